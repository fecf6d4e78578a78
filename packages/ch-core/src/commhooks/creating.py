"""`create`: a configured hook that is not attached to a model yet."""

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from commhooks.compose import Builder, Built
from commhooks.errors import HookConfigError
from commhooks.expression import Node, canonical

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from commhooks.handle import CommHook


def create(
    what: str | Mapping[str, Any] | Callable[..., Any],
    *,
    process_group: "ProcessGroup | None" = None,
    **config: Any,
) -> "CommHook":
    """Build a hook from an expression, a dict, a Reduction, or a `(state, bucket)` function.

    Needs no process group and no model; `commhooks.attach(model, handle)` installs it.

    Args:
        what: e.g. `"powersgd"`, `"bf16_wrapper(powersgd(rank=4))"`, `"acme/topk"`, a canonical dict, a
            policy dict.
        process_group: the group to reduce over; by default the model's own.
        **config: options of the outermost hook, for `create("powersgd", rank=4)`.

    Raises:
        UnknownHookError, AmbiguousHookError, PluginLoadError: a name cannot be found, or its code not
            imported.
        HookConfigError: bad expression, option or value.
    """
    from commhooks.handle import CommHook

    built = resolve(what, config)
    return CommHook(node=built.node, built=built, process_group=process_group)


def resolve(what: str | Mapping[str, Any] | Callable[..., Any], config: Mapping[str, Any]) -> Built:
    """The `Built` of anything `create` and `attach` accept, short of a handle."""
    if isinstance(what, (str, Mapping)):
        return Builder().build(_merged(canonical(what), config))
    if config:
        raise HookConfigError(
            f"options {', '.join(config)} need a hook by name; configure {what!r:.80} itself"
        )
    from commhooks.reduction import Reduction

    if isinstance(what, Reduction):
        return _anonymous(what, "reduction")
    if not callable(what):
        raise HookConfigError(
            f"cannot make a hook of {what!r:.80}: "
            "give an expression, a dict, a Reduction or a (state, bucket) function"
        )
    return _anonymous(what, "ddp")


def _merged(node: Node, config: Mapping[str, Any]) -> Node:
    twice = sorted(set(node["config"]) & set(config))
    if twice:
        raise HookConfigError(
            f"the option {twice[0]!r} of {node['hook']!r} is given in the expression and by keyword"
        )
    return canonical({**node, "config": {**node["config"], **config}}) if config else node


def _anonymous(what: Any, kind: str) -> Built:
    """A hook that came as an object: named after it, so that logs and fingerprints show something stable."""
    label = getattr(what, "__qualname__", None) or type(what).__qualname__
    name = "custom_" + re.sub(r"\W+", "_", label).strip("_").lower()
    node: Node = {"hook": name, "config": {}}
    full: Node = {"hook": name, "module": getattr(what, "__module__", ""), "config": {}}
    return Built(what, kind, node, full)
