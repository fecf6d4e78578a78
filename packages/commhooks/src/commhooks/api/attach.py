"""`commhooks.attach`: puts a hook on a wrapped model of any kind."""

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NoReturn

import torch
import torch.distributed as dist

from ch_core import AttachError, HookNotSupportedError, RankCheck, Reduction, group_timeout, log, refuse_lost
from commhooks.adapters.base import AttachOptions, Binding, FindOptimizers, Scaler
from commhooks.api.create import as_handle
from commhooks.fingerprint import rows_of_model, verify
from commhooks.handle import CommHook
from commhooks.registry.packages import ADAPTERS, all_names
from commhooks.registry.registry import REGISTRY, class_names
from commhooks.report.report import never_compresses

Adapter = Callable[[torch.nn.Module, CommHook, AttachOptions], Binding]
"""Puts a handle's hook on a model, without any collective, because the ranks have not agreed yet.

`attach` then compares the ranks over the binding's `group` if it has one, and calls its `after_agreement()`."""


def attach(
    model: torch.nn.Module,
    hook: str | Mapping[str, Any] | Callable[..., Any] | Reduction | CommHook,
    *,
    state: object | None = None,
    process_group: dist.ProcessGroup | None = None,
    axis: str | None = None,
    optimizer: torch.optim.Optimizer | FindOptimizers | None = None,
    scaler: Scaler | None = None,
    verify_ranks: bool = True,
    timeout: float | None = None,
    manager: object | None = None,
    single_process: bool = False,
    check_ranks_every: int | None = None,
    on_drift: Literal["warn", "raise"] = "warn",
    **config: Any,
) -> CommHook:
    """Put a hook on a wrapped model.

    Args:
        model: a `DistributedDataParallel`, FSDP2 or manager-backed model. The model object stays the same. `attach` finds it
            inside the wrappers of `torch.compile` and of frameworks, e.g. Fabric's module.
        hook: an expression, its dict form, a `(state, bucket)` function, a reduction, or an unattached handle.
        state: initial state, a :class:`~commhooks.HookState`; for a foreign function its own state.
        process_group: group to communicate over; by default the model's own.
        axis: for FSDP2, `"shard"` or `"replicate"` (gradients), or `"gather"` (weights).
        optimizer: rolls back the hook's state after each step that this optimizer, or another one of the model, skips. If
            the optimizers are made later, give a function from parameters to the optimizers that hold one of them. If it
            finds none when the parameters have changed, all ranks raise a StateError.
        scaler: the `GradScaler`. Rolls back after each step that it skips, and stores residuals unscaled.
        verify_ranks: True to compare expression, versions and parameter shapes over all ranks before the first
            collective.
        timeout: seconds that one collective, or a rank in an agreement, may take before a typed error. The default is the
            process group's (`init_process_group(timeout=...)`; torch's default is 30 minutes, on NCCL 10). A value
            shorter than the longest pause of a rank (a checkpoint, an evaluation) ends a healthy run: the group is
            unusable after a timeout.
        manager: for FSDP2, torchft's Manager. `fully_shard` runs inside a replica group, and the hook between the
            groups, which may join and leave (ch-ft). Means are over the groups that take part in a step.
        single_process: True to compress although there is one process. By default a single process trains with exact
            gradients, and the handle's `alone` is True. A foreign function is called in either case.
        check_ranks_every: steps between two comparisons of all parameters across the ranks, by a digest of their bits and
            one small message. It also compares the state that the hook shares, e.g. the Q of PowerSGD. The first
            difference is named in a warning and in `report()`. It skips parameters that may differ between ranks:
            parameters that DDP ignores or `noop` treats, all parameters during local SGD, and different shards.
        on_drift: `"raise"` raises a difference as a RankMismatchError from `backward()` on all ranks.
        **config: options of the outermost hook, for `attach(model, "powersgd", rank=4)`.

    Returns:
        The handle, with `stats()`, `plan()`, `report()`, `state_dict()` and `detach()`.

    Raises:
        AttachError: the model is not wrapped. A SlotTakenError if it has a hook already.
        UnknownHookError, HookConfigError: see :func:`commhooks.create`.
        HookNotSupportedError: the model is an FSDP1 model, or `check_ranks_every` with weight gathers or a manager, whose
            members may differ while they heal.
        RankMismatchError: the ranks do not agree.
        TransportError: a collective over the group failed earlier, or fails now.

    Example:
        >>> import commhooks, torch, torch.distributed as dist
        >>> from torch.nn.parallel import DistributedDataParallel
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> model = DistributedDataParallel(torch.nn.Linear(64, 64))
        >>> from commhooks import Plain
        >>> handle = commhooks.attach(model, Plain(), single_process=True)
        >>> model(torch.ones(1, 64)).sum().backward()
        >>> int(handle.stats()["payload_bytes"])
        16640
        >>> dist.destroy_process_group()
    """
    if not isinstance(model, torch.nn.Module):
        raise AttachError(
            f"attach() takes a model that is wrapped for data parallelism, then a hook; got {type(model).__name__}"
        )
    model = unwrapped(model)
    handle = as_handle(hook, process_group=process_group, state=state, config=config)
    if handle.attached:
        raise AttachError(f"{handle.expr} is attached to a model already; create another handle, or detach() this one")
    if state is not None:
        if handle.reduction is not None and callable(getattr(state, "reduction", None)) and not callable(hook):
            raise AttachError(
                f"{type(state).__name__} has its own options, which {handle.expr} would ignore. Give the hook function "
                "that belongs to the state: commhooks.attach(model, powerSGD_hook, state=state)"
            )
        handle.state = state
    if handle.hook_state is not None:
        handle.hook_state.identity.refuse_other(model.parameters())
    check = RankCheck(check_ranks_every, on_drift) if check_ranks_every is not None else None
    if timeout is None:
        timeout = group_timeout(process_group or handle.process_group or getattr(model, "process_group", None))
    options = AttachOptions(
        process_group or handle.process_group, axis, optimizer, scaler, verify_ranks, timeout, manager
    )
    adapter = adapter_for(model)
    if manager is not None:
        _check_manager(model, adapter, options)
    handle.alone = (
        isinstance(handle.built, Reduction) and manager is None and not single_process and _one_process(adapter)
    )
    try:
        binding = adapter(model, handle, options)
        handle.bind(binding)
        handle.model = weakref.ref(model)
    except BaseException:
        handle.alone = False
        raise
    try:
        refuse_lost(binding.group)
        handle.agreement_timeout = timeout if verify_ranks else None
        if verify_ranks and not handle.alone and binding.engine is not None:
            binding.engine.open_levels()
        if check is not None:
            _check_ranks(handle, binding, check)
        if verify_ranks:
            facts = {"check_ranks_every, on_drift": [f"{check_ranks_every}, {on_drift}" if check is not None else ""]}
            watched = optimizer is not None or scaler is not None
            verify(handle, rows_of_model(model, binding), timeout, watched=watched, facts=facts)
        binding.after_agreement()
    except BaseException:
        handle.detach()
        raise
    never = None if handle.alone else never_compresses(handle.expr, binding)
    if handle.alone:
        _warn_alone(handle.expr)
    if never is not None:
        log.warning("%s", never)
    if binding.engine is not None and binding.engine.transport.rank == 0:
        for caution in handle.cautions():
            log.warning("[rank 0] %s", caution)
    log.info("attached %s to %s", handle.expr, type(model).__name__)
    return handle


def _check_ranks(handle: CommHook, binding: Binding, check: RankCheck) -> None:
    """Let a binding compare parameters across ranks, or note the reason for not comparing.

    Raises:
        HookNotSupportedError: members come and go, or the adapter does not support it.
    """
    engine = binding.engine
    if engine is not None and engine.transport.elastic:
        raise HookNotSupportedError(
            "check_ranks_every: members of a manager may differ while they heal, and the manager itself makes them equal. "
            "Omit check_ranks_every="
        )
    binding.check_ranks(check)
    handle.rank_check = check
    names = [p.name for p in binding.layout.params]
    if handle.reduction is not None and not any(map(handle.reduction.keeps_equal, names)):
        check.leave(f"{handle.expr} leaves each rank its own gradients")
    if check.note:
        log.warning("check_ranks_every: nothing is compared, because %s", check.note)


def runs_alone(model: torch.nn.Module) -> bool:
    """Return True if this is the only process, and no other can join, e.g. while a script is debugged."""
    return _one_process(adapter_for(unwrapped(model)))


def _one_process(adapter: Adapter) -> bool:
    return bool(getattr(adapter, "idles_alone", False)) and dist.is_initialized() and dist.get_world_size() == 1


@functools.cache
def _warn_alone(expr: str) -> None:
    log.warning(
        "one process: %s has no peer, so it compresses nothing. attach(..., single_process=True) compresses anyway",
        expr,
    )


_INSIDE = ("_forward_module", "_orig_mod", "module")
"""Attributes in which Fabric, `torch.compile` and most other wrappers store the model inside."""


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """Return the outermost model with an adapter inside the wrappers of `torch.compile` and frameworks, or the model."""
    claimed = {*REGISTRY.adapters(), *all_names(ADAPTERS)}
    return next((part for part in inside(model) if claimed.intersection(class_names(part))), model)


def inside(model: object) -> Iterator[torch.nn.Module]:
    """Yield the model, the model inside it, and so on."""
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
            f"{type(model).__name__} takes no manager=, because its ranks form one group, which ends with a lost member. To "
            "survive lost members, wrap the module in ch_ft.DistributedDataParallel(manager, module) and attach to that "
            "without manager=, or use fully_shard inside a replica group and attach(manager=)"
        )
    if options.process_group is not None:
        raise AttachError(
            "manager= and process_group= exclude each other, because a manager makes new groups when members join or "
            "leave. Omit process_group="
        )


def adapter_for(model: object) -> Adapter:
    """Return the adapter of the first class in the model's MRO that has one.

    Raises:
        AttachError: no class has an adapter. The model is not wrapped, or the adapter's package is not installed.
    """
    kind, names = type(model).__name__, class_names(model)
    found: Adapter | None = REGISTRY.adapter_of(names, f"support for {kind}")
    if found is not None:
        return found
    if isinstance(model, torch.nn.DataParallel):
        raise AttachError(
            "cannot attach to DataParallel: it has one process and sends no gradients. Start a process for each device with "
            "torchrun, wrap the model in torch.nn.parallel.DistributedDataParallel, and attach to that"
        )
    others = [name for name in REGISTRY.wraps() if name != "DistributedDataParallel"]
    also = f". {', '.join(others)} also work" if others else ""
    raise AttachError(
        f"cannot attach to {kind}: it is not wrapped for data parallelism. Wrap it before attach(): "
        f"model = torch.nn.parallel.DistributedDataParallel(model){also}"
    )


def refuse_fsdp1(model: torch.nn.Module, handle: CommHook, options: AttachOptions) -> NoReturn:
    """Refuse an FSDP1 model, as its adapter, so that `commhooks run` still accepts models that never train."""
    raise HookNotSupportedError(
        f"attach() cannot put {handle.expr} on FullyShardedDataParallel (FSDP1), which PyTorch has deprecated. Shard the "
        "model with fully_shard (FSDP2) and attach to that. Or keep FSDP1 and register a hook function in PyTorch's form: "
        "model.register_comm_hook(LowPrecisionState(group), bf16_compress_hook)"
    )
