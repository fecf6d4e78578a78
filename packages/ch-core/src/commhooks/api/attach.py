"""``commhooks.attach``: one call for every kind of model."""

import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

from commhooks.adapters.base import AttachOptions, Binding
from commhooks.api.create import as_handle
from commhooks.errors import AttachError, HookNotSupportedError
from commhooks.fingerprint import rows_of_model, verify
from commhooks.handle import CommHook
from commhooks.reduction import Reduction
from commhooks.registry.known_names import KNOWN_ADAPTERS
from commhooks.registry.registry import REGISTRY, class_names
from commhooks.report.report import never_compresses
from commhooks.state import HookState, refuse_judge
from commhooks.transport.process_group import group_timeout, refuse_lost

log = logging.getLogger("commhooks")


Adapter = Callable[[torch.nn.Module, CommHook, AttachOptions], Binding]
"""Puts a handle's hook in place on a model of its kind, without any collective: the ranks have not agreed yet.

A binding that has a ``group`` is then verified over it, and its ``ready()`` is called after that."""


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
    timeout: float | None = None,
    manager: object | None = None,
    single_process: bool = False,
    rollback: bool = True,
    **config: Any,
) -> CommHook:
    """Put a hook in place on a wrapped model.

    Args:
        model: a ``DistributedDataParallel``, FSDP or manager-backed model, as it is: no new model is made. What
            ``torch.compile`` or a framework has put around it (Fabric's module, say) is looked through.
        what: an expression, its dict form, a ``(state, bucket)`` function, a reduction, or an unattached handle.
        state: state to go on from (a :class:`~commhooks.state.HookState`), or a foreign function's own state.
        process_group: group to communicate over; the model's own if not given.
        axis: for FSDP2, ``"shard"`` or ``"replicate"``.
        optimizer: told apart by it, a step that the optimizer skipped is rolled back.
        scaler: the ``GradScaler``: a step it skipped is rolled back, and residuals are kept unscaled.
        verify_ranks: compare expression, versions and parameter shapes over all ranks before the first collective.
        timeout: seconds that one collective, or a rank in an agreement, may take before it is a typed error. Left out,
            those of the process group (``init_process_group(timeout=...)``; torch's default is 30 minutes, on NCCL 10).
            Shorter than the longest pause of a rank (a checkpoint, an evaluation) it ends a healthy run: after it the
            group can be used no more.
        manager: for FSDP2, torchft's Manager: ``fully_shard`` inside a replica group, the hook between the groups, which
            may come and go (``ch-ft``). Means are over those that take part in a step.
        single_process: compress although there is one process. Left out, a script that is debugged alone runs with exact
            gradients: the handle is there, and its ``alone`` is ``True``. A function of your own is called all the same.
        rollback: ``False`` keeps one copy of the hook's state instead of two, the same on all ranks: four bytes less per
            parameter with an fp32 residual. A step that does not count, because a hook raised or numbers were not finite,
            then loses the state (residuals begin at zero) instead of giving it back, and the log says so. Not together
            with ``optimizer=``, ``scaler=`` or a manager, which give steps back.
        **config: options of the outermost hook, for ``attach(model, "powersgd", rank=4)``.

    Returns:
        The handle: ``stats()``, ``plan()``, ``state_dict()``, ``detach()``.

    Raises:
        AttachError: the model is not wrapped; a SlotTakenError: it has a hook already.
        UnknownHookError, HookConfigError: see :func:`commhooks.create`.
        HookNotSupportedError: ``rollback=False`` with a function that keeps its state itself, or with who gives steps back.
        RankMismatchError: the ranks do not agree.
        TransportError: a collective over the group failed or was given up earlier.

    Example:
        >>> import commhooks, torch, torch.distributed as dist
        >>> from torch.nn.parallel import DistributedDataParallel
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> model = DistributedDataParallel(torch.nn.Linear(64, 64))
        >>> from commhooks.reduction import Plain
        >>> handle = commhooks.attach(model, Plain(), single_process=True)
        >>> model(torch.ones(1, 64)).sum().backward()
        >>> int(handle.stats()["payload_bytes"])
        16640
        >>> dist.destroy_process_group()
    """
    if not isinstance(model, torch.nn.Module):
        raise AttachError(
            f"attach() takes a model, wrapped for data parallelism, and then a hook; got {type(model).__name__}"
        )
    model = unwrapped(model)
    handle = as_handle(what, process_group=process_group, state=state, config=config)
    if handle.attached:
        raise AttachError(f"{handle.expr} is attached to a model already; create another handle, or detach() this one")
    if state is not None:
        if handle.reduction is not None and callable(getattr(state, "reduction", None)) and not callable(what):
            raise AttachError(
                f"{type(state).__name__} has options of its own, which {handle.expr} would not follow: give the hook "
                "function that belongs to it, commhooks.attach(model, powerSGD_hook, state=state)"
            )
        handle.state = state
    if not rollback:
        judges = {"optimizer=": optimizer, "scaler=": scaler, "manager=": manager}
        refuse_rollback(handle, next((name for name, given in judges.items() if given is not None), None))
    if isinstance(handle.state, HookState):
        handle.state.refuse_other(model.parameters())
        handle.state.keep_copies(one=not rollback)
    if timeout is None:
        timeout = group_timeout(process_group or handle.process_group or getattr(model, "process_group", None))
    options = AttachOptions(
        process_group or handle.process_group, axis, optimizer, scaler, verify_ranks, timeout, manager
    )
    adapter = adapter_for(model)
    if manager is not None:
        _check_manager(model, adapter, options)
    handle.alone = isinstance(handle.built, Reduction) and manager is None and not single_process and _alone(adapter)
    try:
        binding = adapter(model, handle, options)
        handle.bind(binding)
    except BaseException:
        handle.alone = False
        raise
    try:
        refuse_lost(binding.group)
        handle.agreement_timeout = timeout if verify_ranks else None
        if verify_ranks:
            verify(handle, rows_of_model(model), timeout, watched=optimizer is not None or scaler is not None)
        binding.ready()
    except BaseException:
        handle.detach()
        raise
    never = None if handle.alone else never_compresses(handle.expr, binding)
    if handle.alone:
        _say_once(handle.expr)
    if never is not None:
        log.warning("%s", never)
    if binding.engine is not None and binding.engine.transport.rank == 0:
        for caution in handle.cautions():
            log.warning("[rank 0] %s", caution)
    log.info("attached %s to %s", handle.expr, type(model).__name__)
    return handle


def refuse_rollback(handle: CommHook, judge: str | None) -> None:
    """Refuse ``rollback=False`` where it cannot be.

    Args:
        handle: of what is attached.
        judge: who may give a step back, if anybody is given.

    Raises:
        HookNotSupportedError: naming the reason.
    """
    if judge is not None:
        refuse_judge(judge)
    if handle.reduction is None:
        raise HookNotSupportedError(
            f"rollback=False: {handle.expr} is a function that keeps its state itself, and never gives a step back; leave "
            "it out"
        )


def runs_alone(model: torch.nn.Module) -> bool:
    """Return True if this is the only process, and no other can join, e.g. while a script is debugged."""
    return _alone(adapter_for(unwrapped(model)))


def _alone(adapter: Adapter) -> bool:
    return bool(getattr(adapter, "idles_alone", False)) and dist.is_initialized() and dist.get_world_size() == 1


@functools.cache
def _say_once(expr: str) -> None:
    log.warning(
        "one process: %s has nobody to send to, and compresses nothing (attach(..., single_process=True) would)", expr
    )


_INSIDE = ("_forward_module", "_orig_mod", "module")
"""Where Fabric, ``torch.compile`` and most other wrappers keep what they are put around."""


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """The outermost model that an adapter serves, in what ``torch.compile`` and frameworks have put around it; the model
    itself if there is none.
    """
    claimed = {*REGISTRY.adapters(), *KNOWN_ADAPTERS}
    return next((part for part in inside(model) if claimed.intersection(class_names(part))), model)


def inside(model: object) -> Iterator[torch.nn.Module]:
    """The model and what is wrapped in it, one in another."""
    seen: set[int] = set()
    part: object = model
    while isinstance(part, torch.nn.Module) and id(part) not in seen:
        yield part
        seen.add(id(part))
        wrapped = (getattr(part, name, None) for name in _INSIDE)
        part = next((one for one in wrapped if isinstance(one, torch.nn.Module)), None)


def _check_manager(model: torch.nn.Module, adapter: Adapter, options: AttachOptions) -> None:
    if not getattr(adapter, "takes_manager", False):
        raise AttachError(
            f"{type(model).__name__} takes no manager=: its ranks are one group, which a lost member ends. For data "
            "parallelism that survives its members wrap the module in ch_ft.DistributedDataParallel(manager, module) "
            "and attach to that without manager=; or use fully_shard inside a replica group, and attach(manager=)"
        )
    if options.process_group is not None:
        raise AttachError(
            "manager= and process_group= exclude each other: a manager makes its own groups, anew whenever members come "
            "or go. Leave process_group= out"
        )


def adapter_for(model: object) -> Adapter:
    """The adapter of the first class in the model's MRO that has one.

    Raises:
        AttachError: none has: the model is not wrapped for data parallelism, or its package is not installed.
    """
    found: Adapter | None = REGISTRY.adapter_of(class_names(model), f"the adapter for {type(model).__name__}")
    if found is not None:
        return found
    kinds = ", ".join(sorted({name.rsplit(".", 1)[-1] for name in REGISTRY.adapters()}))
    raise AttachError(
        f"cannot attach to {type(model).__name__}: it is not wrapped for data parallelism. Wrap it first, e.g. "
        f"model = torch.nn.parallel.DistributedDataParallel(model); installed adapters: {kinds}"
    )
