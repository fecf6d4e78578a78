"""`create`: builds a configured hook that is not attached to a model."""

import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from ch_core import AttachError, CommHooksError, HookConfigError, Reduction
from commhooks.handle import CommHook
from commhooks.registry.build import as_reduction, build
from commhooks.registry.expression import Node, canonical

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def create(
    hook: str | Mapping[str, Any] | Callable[..., Any] | Reduction,
    *,
    process_group: "ProcessGroup | None" = None,
    **config: Any,
) -> "CommHook":
    """Build a hook from an expression, a dict, a Reduction, or a `(state, bucket)` function.

    Needs no process group and no model; `commhooks.attach(model, handle)` installs it.

    Args:
        hook: e.g. `"powersgd"`, `"bf16_wrapper(powersgd(rank=4))"`, `"acme/topk"`, a canonical dict, a policy dict.
        process_group: group to reduce over; by default the model's own.
        **config: options of the outermost hook, for `create("powersgd", rank=4)`.

    Raises:
        UnknownHookError, AmbiguousHookError: a name cannot be resolved.
        PluginLoadError: the code of a hook cannot be imported.
        HookConfigError: the expression, an option or a value is illegal.
        AttachError: `hook` is of a type that no hook has.

    Example:
        >>> create("warmup(allreduce, steps=2)").expr
        'warmup(allreduce, steps=2)'
    """
    if not isinstance(hook, str | Mapping):
        return as_handle(hook, process_group=process_group, config=config)
    built = build(_merged(canonical(hook), config))
    state = built.make_state(process_group) if built.make_state is not None else None
    return CommHook(node=built.node, built=built.value, process_group=process_group, state=state, full=built.full)


def _merged(node: Node, config: Mapping[str, Any]) -> Node:
    twice = sorted(set(node["config"]) & set(config))
    if twice:
        raise HookConfigError(
            f"the option {twice[0]!r} of {node['hook']!r} appears in the expression and as a keyword; set it once"
        )
    return canonical({**node, "config": {**node["config"], **config}}) if config else node


def as_handle(
    hook: str | Mapping[str, Any] | Callable[..., Any] | Reduction | CommHook,
    *,
    process_group: dist.ProcessGroup | None = None,
    state: object | None = None,
    config: Mapping[str, Any] | None = None,
) -> CommHook:
    """Return an unattached handle from any argument that :func:`attach` takes as a hook."""
    if isinstance(hook, str | Mapping):
        return create(hook, process_group=process_group, **(config or {}))
    if config:
        raise HookConfigError(f"options {', '.join(config)} need a hook by name; configure {hook!r:.80} itself")
    if isinstance(hook, CommHook):
        return hook
    _refuse_class(hook)
    made = hook if isinstance(hook, Reduction) else _reduction_of(hook, state)
    if made is None and inspect.isgeneratorfunction(getattr(hook, "func", hook)):
        made = as_reduction(hook)
    built = made if made is not None else hook
    if isinstance(built, Reduction):
        node = built.node()
        return CommHook(node=node, built=built, process_group=process_group, full=_registered(node, built))
    if not callable(built):
        raise AttachError(
            f"cannot attach {type(hook).__name__}: give an expression such as 'powersgd(rank=4)', a dict, a "
            "(state, bucket) function, a reduction, or a handle from commhooks.create()"
        )
    name = getattr(built, "__name__", type(built).__name__)
    return CommHook(node={"hook": name, "config": {}}, built=built, process_group=process_group)


def _refuse_class(hook: object) -> None:
    """Refuse the class of a reduction. It is callable, so DDP would call it as a hook in the backward."""
    if isinstance(hook, type) and issubclass(hook, Reduction):
        raise AttachError(f"{hook.__name__} is a class, and a hook is an object of it: give {hook.__name__}()")


def _registered(node: Node, given: Reduction) -> Node | None:
    """Return the full node of a reduction object, if the registry builds an equal object of its expression, or None.

    Ranks compare full nodes, and states have them. A state therefore fits the object and the expression.
    """
    try:
        made = build(node)
    except CommHooksError:
        return None
    same = type(made.value) is type(given) and made.value.node() == node
    return made.full if same else None


def _reduction_of(hook: object, state: object) -> Reduction | None:
    """Return the reduction behind a hook function of this project. Some functions make it from the state."""
    carried = getattr(hook, "reduction", None)
    if isinstance(carried, Reduction) or not callable(carried):
        return carried if isinstance(carried, Reduction) else None
    if state is None:
        name = getattr(hook, "__name__", "this hook")
        raise AttachError(f"{name} takes its options from a state: commhooks.attach(model, {name}, state=...)")
    made: Reduction = carried(state)
    return made
