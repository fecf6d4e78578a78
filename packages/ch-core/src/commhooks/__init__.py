"""The gradient-communication layer for PyTorch data parallelism.

Every hook has a name: `commhooks.attach(model, "bf16_wrapper(powersgd(rank=4))")` installs one,
`commhooks.list_hooks()` shows what is installed. The names below are imported when first used: importing this
package, and listing hooks, loads no torch.
"""

from typing import TYPE_CHECKING

from commhooks.lazy import lazy

if TYPE_CHECKING:
    from commhooks.attaching import attach
    from commhooks.bucket import Bucket, BucketLayout, ParamLayout
    from commhooks.compose import why_not
    from commhooks.creating import create
    from commhooks.ddp import as_hook
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
        StateError,
        UnknownHookError,
    )
    from commhooks.handle import CommHook
    from commhooks.hookspecs import hookimpl
    from commhooks.lookup import describe, failures, get, list_hooks, refresh, register, spec, unregister
    from commhooks.parts import composed
    from commhooks.reduction import Reduction, Stages, StepContext
    from commhooks.requests import AllGather, AllReduce, AllToAll, ReduceScatter
    from commhooks.specs import HookSpec, Needs, Param, PluginFailure
    from commhooks.state import DefaultState, HookState, LowPrecisionState
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
    "DefaultState",
    "GradBucket",
    "HookConfigError",
    "HookNotSupportedError",
    "HookResultError",
    "HookSpec",
    "HookState",
    "HookTimeoutError",
    "LowPrecisionState",
    "Needs",
    "Param",
    "ParamLayout",
    "PluginFailure",
    "PluginLoadError",
    "RankMismatchError",
    "ReduceScatter",
    "Reduction",
    "RemoteHookError",
    "Stages",
    "StateError",
    "StepContext",
    "UnknownHookError",
    "as_hook",
    "attach",
    "composed",
    "create",
    "describe",
    "failures",
    "get",
    "hookimpl",
    "list_hooks",
    "refresh",
    "register",
    "spec",
    "unregister",
    "why_not",
]

__getattr__, __dir__ = lazy(
    __name__,
    {
        "attaching": "attach",
        "bucket": "Bucket BucketLayout ParamLayout",
        "compose": "why_not",
        "creating": "create",
        "ddp": "as_hook",
        "errors": "AmbiguousHookError AttachError CommHooksError HookConfigError HookNotSupportedError "
        "HookResultError HookTimeoutError PluginLoadError RankMismatchError RemoteHookError StateError "
        "UnknownHookError",
        "handle": "CommHook",
        "hookspecs": "hookimpl",
        "lookup": "describe failures get list_hooks refresh register spec unregister",
        "parts": "composed",
        "reduction": "Reduction Stages StepContext",
        "requests": "AllGather AllReduce AllToAll ReduceScatter",
        "specs": "HookSpec Needs Param PluginFailure",
        "state": "DefaultState HookState LowPrecisionState",
        "typing": "GradBucket",
    },
)
