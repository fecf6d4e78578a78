"""``commhooks.attach``: one call for every kind of model."""

import inspect
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from commhooks._discovery import load_target
from commhooks._registry import adapters
from commhooks.agreement import verify
from commhooks.creating import create
from commhooks.errors import AttachError
from commhooks.handle import Binding, CommHook
from commhooks.reduction import Reduction, as_reduction
from commhooks.state import HookState

log = logging.getLogger("commhooks")


@dataclass(frozen=True, slots=True)
class AttachOptions:
    """Arguments of :func:`attach` that an adapter may need."""

    process_group: dist.ProcessGroup | None = None
    axis: str | None = None
    optimizer: torch.optim.Optimizer | None = None
    scaler: object | None = None
    verify_ranks: bool = True
    timeout: float = 60.0


Adapter = Callable[[torch.nn.Module, CommHook, AttachOptions], Binding]
"""Puts a handle's hook in place on a model of its kind, without any collective: the ranks have not agreed yet.

A binding that has a ``group`` is then verified over it; its ``ready()``, if it has one, is called after that."""


def attach(
    model: torch.nn.Module,
    what: str | Mapping[str, Any] | Callable[..., Any] | Reduction | CommHook,
    *,
    state: object | None = None,
    process_group: dist.ProcessGroup | None = None,
    axis: str | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    scaler: object | None = None,
    verify_ranks: bool = True,
    timeout: float = 60.0,
) -> CommHook:
    """Put a hook in place on a wrapped model.

    Args:
        model: a ``DistributedDataParallel``, FSDP or manager-backed model, as it is: no new model is made.
        what: an expression, its dict form, a ``(state, bucket)`` function, a reduction, or an unattached handle.
        state: state to go on from (a :class:`~commhooks.state.HookState`), or a foreign function's own state.
        process_group: group to communicate over; the model's own if not given.
        axis: for FSDP2, ``"shard"`` or ``"replicate"``.
        optimizer: told apart by it, a step that the optimizer skipped is rolled back.
        scaler: the ``GradScaler``: a step it skipped is rolled back, and residuals are kept unscaled.
        verify_ranks: compare expression, versions and parameter shapes over all ranks before the first collective.
        timeout: seconds that one collective may take before it is a typed error.

    Returns:
        The handle: ``stats()``, ``plan()``, ``state_dict()``, ``detach()``.

    Raises:
        AttachError: the model is not wrapped, or its hook slot is taken.
        UnknownHookError, HookConfigError: see :func:`commhooks.create`.
        RankMismatchError: the ranks do not agree.

    Example:
        >>> import commhooks, torch, torch.distributed as dist
        >>> from torch.nn.parallel import DistributedDataParallel
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> model = DistributedDataParallel(torch.nn.Linear(64, 64))
        >>> from commhooks.reduction import Plain
        >>> handle = commhooks.attach(model, Plain())
        >>> model(torch.ones(1, 64)).sum().backward()
        >>> int(handle.stats()["payload_bytes"])
        16640
        >>> dist.destroy_process_group()
    """
    if not isinstance(model, torch.nn.Module):
        raise AttachError(
            f"attach() takes a model, wrapped for data parallelism, and then a hook; got {type(model).__name__}"
        )
    handle = as_handle(what, process_group=process_group, state=state)
    if handle.attached:
        raise AttachError(f"{handle.expr} is attached to a model already; create another handle, or detach() this one")
    if state is not None:
        if handle.reduction is not None and callable(getattr(state, "reduction", None)) and not callable(what):
            raise AttachError(
                f"{type(state).__name__} has options of its own, which {handle.expr} would not follow: give the hook "
                "function that belongs to it, commhooks.attach(model, powerSGD_hook, state=state)"
            )
        handle.state = state
    if isinstance(handle.state, HookState):
        handle.state.refuse_other(model.parameters())
    options = AttachOptions(process_group or handle.process_group, axis, optimizer, scaler, verify_ranks, timeout)
    handle.bind(adapter_for(model)(model, handle, options), model)
    try:
        handle.agreement_timeout = timeout if verify_ranks else None
        if verify_ranks:
            verify(handle, model, timeout, watched=optimizer is not None or scaler is not None)
        ready = getattr(handle.binding, "ready", None)
        if ready is not None:
            ready()
    except BaseException:
        handle.detach()
        raise
    log.info("attached %s to %s", handle.expr, type(model).__name__)
    return handle


def as_handle(
    what: str | Mapping[str, Any] | Callable[..., Any] | Reduction | CommHook,
    *,
    process_group: dist.ProcessGroup | None = None,
    state: object | None = None,
) -> CommHook:
    """An unattached handle from anything :func:`attach` takes."""
    if isinstance(what, CommHook):
        return what
    if isinstance(what, str | Mapping):
        return create(what, process_group=process_group)
    made = what if isinstance(what, Reduction) else _carried(what, state)
    if made is None and inspect.isgeneratorfunction(getattr(what, "func", what)):
        made = as_reduction(what)
    built = made if made is not None else what
    if isinstance(built, Reduction):
        return CommHook(node=built.node(), built=built, process_group=process_group)
    if not callable(built):
        raise AttachError(
            f"cannot attach {type(what).__name__}: give an expression such as 'powersgd(rank=4)', a dict, a "
            "(state, bucket) function, a reduction, or a handle from commhooks.create()"
        )
    name = getattr(built, "__name__", type(built).__name__)
    return CommHook(node={"hook": name, "config": {}}, built=built, process_group=process_group)


def _carried(what: object, state: object) -> Reduction | None:
    """The reduction that one of our own hook functions carries, made from its state where it needs one."""
    carried = getattr(what, "reduction", None)
    if isinstance(carried, Reduction) or not callable(carried):
        return carried if isinstance(carried, Reduction) else None
    if state is None:
        name = getattr(what, "__name__", "this hook")
        raise AttachError(f"{name} takes its options from a state: commhooks.attach(model, {name}, state=...)")
    made: Reduction = carried(state)
    return made


def adapter_for(model: object) -> Adapter:
    """The adapter of the first class in the model's MRO that has one.

    Raises:
        AttachError: none has: the model is not wrapped for data parallelism.
    """
    known = adapters()
    for cls in type(model).__mro__:
        target = known.get(f"{cls.__module__}.{cls.__qualname__}")
        if target is not None:
            adapter: Adapter = load_target(target)
            return adapter
    kinds = ", ".join(sorted(name.rsplit(".", 1)[-1] for name in known))
    raise AttachError(
        f"cannot attach to {type(model).__name__}: it is not wrapped for data parallelism. Wrap it first, e.g. "
        f"model = torch.nn.parallel.DistributedDataParallel(model); installed adapters: {kinds}"
    )
