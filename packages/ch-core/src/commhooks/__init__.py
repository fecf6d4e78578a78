"""The gradient-communication layer for PyTorch data parallelism.

Every hook has a name: `commhooks.attach(model, "bf16_wrapper(powersgd(rank=4))")` installs one,
`commhooks.list_hooks()` shows what is installed. The names below are imported when first used: importing this
package, and listing hooks, loads no torch.
"""

from typing import TYPE_CHECKING

from commhooks._lazy import lazy

if TYPE_CHECKING:
    from commhooks.api.attach import attach
    from commhooks.api.create import create
    from commhooks.api.hooks import describe, failures, get, list_hooks, refresh, register, spec, unregister, why_not
    from commhooks.api.reducer import Exchange, Reducer
    from commhooks.bucket import Bucket, BucketLayout, ParamLayout, per_layout
    from commhooks.compositions.base import Composite, composed
    from commhooks.compositions.wire_cast import WireCast
    from commhooks.encoding import Packed
    from commhooks.errors import (
        AmbiguousHookError,
        AttachError,
        CommHooksError,
        HookConfigError,
        HookNotSupportedError,
        HookResultError,
        HookTimeoutError,
        PluginLoadError,
        RankMismatchError,
        RemoteHookError,
        SlotTakenError,
        StateError,
        TransportError,
        UnknownHookError,
    )
    from commhooks.fsdp_states import DefaultState, LowPrecisionState
    from commhooks.handle import CommHook
    from commhooks.reduction import Plain, Reduction, Stages, StepContext
    from commhooks.registry.build import as_hook
    from commhooks.registry.expression import canonical
    from commhooks.registry.hookspecs import hookimpl
    from commhooks.registry.options import Option, Options, option
    from commhooks.registry.spec import HookSpec, Needs, PluginFailure
    from commhooks.report.plan import PlanRow
    from commhooks.report.report import Report, ReportRow
    from commhooks.requests import AllGather, AllReduce, AllToAll, ReduceScatter, Request, Requests, Wire
    from commhooks.shards import ShardLayout, Shards
    from commhooks.state import HookState
    from commhooks.typing import GradBucket

__all__ = [
    "AllGather",
    "AllReduce",
    "AllToAll",
    "AmbiguousHookError",
    "AttachError",
    "Bucket",
    "BucketLayout",
    "CommHook",
    "CommHooksError",
    "Composite",
    "DefaultState",
    "Exchange",
    "GradBucket",
    "HookConfigError",
    "HookNotSupportedError",
    "HookResultError",
    "HookSpec",
    "HookState",
    "HookTimeoutError",
    "LowPrecisionState",
    "Needs",
    "Option",
    "Options",
    "Packed",
    "ParamLayout",
    "Plain",
    "PlanRow",
    "PluginFailure",
    "PluginLoadError",
    "RankMismatchError",
    "ReduceScatter",
    "Reducer",
    "Reduction",
    "RemoteHookError",
    "Report",
    "ReportRow",
    "Request",
    "Requests",
    "ShardLayout",
    "Shards",
    "SlotTakenError",
    "Stages",
    "StateError",
    "StepContext",
    "TransportError",
    "UnknownHookError",
    "Wire",
    "WireCast",
    "as_hook",
    "attach",
    "canonical",
    "composed",
    "create",
    "describe",
    "failures",
    "get",
    "hookimpl",
    "lazy",
    "list_hooks",
    "option",
    "per_layout",
    "refresh",
    "register",
    "spec",
    "unregister",
    "why_not",
]

__getattr__, __dir__ = lazy(
    __name__,
    {
        "registry.expression": "canonical",
        "compositions.wire_cast": "WireCast",
        "api.attach": "attach",
        "api.create": "create",
        "api.hooks": "describe failures get list_hooks refresh register spec unregister why_not",
        "api.reducer": "Exchange Reducer",
        "bucket": "Bucket BucketLayout ParamLayout per_layout",
        "compositions.base": "Composite composed",
        "errors": "TransportError AmbiguousHookError AttachError CommHooksError HookConfigError HookNotSupportedError "
        "HookResultError HookTimeoutError PluginLoadError RankMismatchError RemoteHookError "
        "SlotTakenError StateError UnknownHookError",
        "fsdp_states": "DefaultState LowPrecisionState",
        "handle": "CommHook",
        "reduction": "Plain Reduction Stages StepContext",
        "registry.build": "as_hook",
        "registry.hookspecs": "hookimpl",
        "registry.options": "Option Options option",
        "registry.spec": "HookSpec Needs PluginFailure",
        "report.report": "Report ReportRow",
        "report.plan": "PlanRow",
        "requests": "Request Requests AllGather AllReduce AllToAll ReduceScatter Wire",
        "encoding": "Packed",
        "shards": "ShardLayout Shards",
        "state": "HookState",
        "typing": "GradBucket",
    },
)
