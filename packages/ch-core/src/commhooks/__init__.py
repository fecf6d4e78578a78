"""The gradient-communication layer for PyTorch data parallelism.

Every hook has a name: `commhooks.attach(model, "bf16_wrapper(powersgd(rank=4))")` installs one,
`commhooks.list_hooks()` shows what is installed. The names below are imported when first used: importing this
package, and listing hooks, loads no torch.
"""

from typing import TYPE_CHECKING

from commhooks._lazy import lazy

if TYPE_CHECKING:
    from commhooks.api.attaching import attach
    from commhooks.api.creating import create
    from commhooks.api.lookup import describe, failures, get, list_hooks, refresh, register, spec, unregister
    from commhooks.api.reducing import Exchange, Reducer
    from commhooks.api.usable import why_not
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
    from commhooks.registry.expression import canonical
    from commhooks.registry.hook_function import as_hook
    from commhooks.registry.hookspecs import hookimpl
    from commhooks.registry.options import Options, option
    from commhooks.registry.specs import HookSpec, Needs, Param, PluginFailure
    from commhooks.report.report import Report, ReportRow
    from commhooks.report.rows import PlanRow
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
    "Options",
    "Packed",
    "Param",
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
        "api.attaching": "attach",
        "api.creating": "create",
        "api.lookup": "describe failures get list_hooks refresh register spec unregister",
        "api.reducing": "Exchange Reducer",
        "api.usable": "why_not",
        "bucket": "Bucket BucketLayout ParamLayout per_layout",
        "compositions.base": "Composite composed",
        "errors": "TransportError AmbiguousHookError AttachError CommHooksError HookConfigError HookNotSupportedError "
        "HookResultError HookTimeoutError PluginLoadError RankMismatchError RemoteHookError "
        "SlotTakenError StateError UnknownHookError",
        "fsdp_states": "DefaultState LowPrecisionState",
        "handle": "CommHook",
        "reduction": "Plain Reduction Stages StepContext",
        "registry.hook_function": "as_hook",
        "registry.hookspecs": "hookimpl",
        "registry.options": "Options option",
        "registry.specs": "HookSpec Needs Param PluginFailure",
        "report.report": "Report ReportRow",
        "report.rows": "PlanRow",
        "requests": "Request Requests AllGather AllReduce AllToAll ReduceScatter Wire",
        "encoding": "Packed",
        "shards": "ShardLayout Shards",
        "state": "HookState",
        "typing": "GradBucket",
    },
)
