"""`create`: a configured hook that is not attached to a model yet."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from commhooks.compose import Builder
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

    if not isinstance(what, str | Mapping):
        from commhooks.attaching import as_handle  # imports this module

        if config:
            raise HookConfigError(f"options {', '.join(config)} need a hook by name; configure {what!r:.80} itself")
        return as_handle(what, process_group=process_group)
    built = Builder().build(_merged(canonical(what), config))
    state = built.make_state(process_group) if built.make_state is not None else None
    return CommHook(node=built.node, built=built.value, process_group=process_group, state=state, full=built.full)


def _merged(node: Node, config: Mapping[str, Any]) -> Node:
    twice = sorted(set(node["config"]) & set(config))
    if twice:
        raise HookConfigError(f"the option {twice[0]!r} of {node['hook']!r} is given in the expression and by keyword")
    return canonical({**node, "config": {**node["config"], **config}}) if config else node
