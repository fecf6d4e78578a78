"""`commhooks.attach`: puts a hook on a wrapped model of any kind."""

import functools
import logging
import weakref
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, Literal

import torch
import torch.distributed as dist

from ch_core import AttachError, HookNotSupportedError, Link, RankCheck, Reduction, group_timeout, log, refuse_lost
from commhooks.adapters.base import Binding, leads
from commhooks.adapters.low_rank import low_rank_refusal
from commhooks.adapters.options import AttachOptions, FindOptimizers, Scaler
from commhooks.api.adapter_lookup import Adapter, adapter_for, one_process, unwrapped
from commhooks.api.create import as_handle
from commhooks.api.start_line import start_line
from commhooks.fingerprint import rows_of_model, verify
from commhooks.handle import CommHook, refuse_weights
from commhooks.report.report import never_compresses


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
    link: str | None = None,
    single_process: bool = False,
    check_ranks_every: int | None = None,
    on_drift: Literal["warn", "raise"] = "warn",
    weighted: bool = False,
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
        link: rate and round trip of the slowest link between two ranks, e.g. `"200mbit,80ms"`, if ranks on CPUs are far
            apart (from 5 ms on). A step of gloo then takes as few half round trips as it can. It changes the order in which
            numbers are added, and how often they are rounded. `"far"` means `"200mbit,80ms"`.
        single_process: True to compress although there is one process. By default a single process trains with exact
            gradients, and the handle's `alone` is True. A foreign function is called in either case.
        check_ranks_every: steps between two comparisons of all parameters across the ranks, by a digest of their bits and
            one small message. It also compares the state that the hook shares, e.g. the Q of PowerSGD. The first
            difference is named in a warning and in `report()`. It skips parameters that may differ between ranks:
            parameters that DDP ignores or `noop` treats, all parameters during local SGD, and different shards.
        on_drift: `"raise"` raises a difference as a RankMismatchError from `backward()` on all ranks.
        weighted: True to average by weights, such as tokens: `sum(n_r g_r) / sum(n_r)`. Every rank then calls
            :meth:`.CommHook.weigh` before each backward. All ranks need the same value.
        **config: options of the outermost hook, for `attach(model, "powersgd", rank=4)`.

    Returns:
        The handle, with `stats()`, `plan()`, `report()`, `state_dict()` and `detach()`.

    Raises:
        AttachError: the model is not wrapped. A SlotTakenError if it has a hook already.
        UnknownHookError, HookConfigError: see :func:`commhooks.create`.
        HookNotSupportedError: the model is an FSDP1 model, or `check_ranks_every` with weight gathers or a manager, whose
            members may differ while they heal. `weighted=True` with a hook that averages nothing, or on two axes of a mesh. Also
            with `optimizer=`, if the hook sends matrices of low rank and a Muon steps them; the first step of a Muon that is not
            known yet raises it.
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
        _set_state(handle, hook, state)
    if handle.hook_state is not None:
        handle.hook_state.identity.refuse_other(model.parameters())
    check = RankCheck(check_ranks_every, on_drift) if check_ranks_every is not None else None
    group = process_group or handle.process_group
    if timeout is None:
        timeout = group_timeout(group or getattr(model, "process_group", None))
    handle.link = Link.parse(link) if link is not None else None
    handle.weighted = weighted
    options = AttachOptions(group, axis, optimizer, scaler, verify_ranks, timeout, manager, handle.link)
    adapter = adapter_for(model)
    if manager is not None:
        _check_manager(model, adapter, options)
    alone = isinstance(handle.built, Reduction) and manager is None and not single_process and one_process(adapter)
    with handle.hook_state.restored_on_error() if handle.hook_state is not None else nullcontext():
        binding = _bind(model, handle, adapter, options, alone=alone)
        try:
            if weighted:
                refuse_weights(handle, binding.layout)
                binding.weigh_ranks()
                handle.syncs_batches = any(isinstance(module, torch.nn.SyncBatchNorm) for module in model.modules())
            _agree(model, handle, binding, options, check)
            if binding.watch is not None and (refusal := low_rank_refusal(handle, binding)) is not None:
                binding.watch.refuse(refusal)
            binding.after_agreement()
        except BaseException:
            handle.detach()
            raise
    _log_attached(model, handle, binding)
    return handle


def _set_state(handle: CommHook, hook: object, state: object) -> None:
    """Give a handle its initial state.

    Raises:
        AttachError: the state has options, and the hook was not given as the function that reads them.
    """
    if handle.reduction is not None and callable(getattr(state, "reduction", None)) and not callable(hook):
        raise AttachError(
            f"{type(state).__name__} has its own options, which {handle.expr} would ignore. Give the hook function "
            "that belongs to the state: commhooks.attach(model, powerSGD_hook, state=state)"
        )
    handle.state = state


def _bind(
    model: torch.nn.Module, handle: CommHook, adapter: Adapter, options: AttachOptions, *, alone: bool
) -> Binding:
    """Let the adapter put the hook on the model, and bind the handle to it. It averages plainly if it is alone."""
    handle.alone = alone  # first, because the adapter makes an engine of `handle.reduction`
    try:
        binding = adapter(model, handle, options)
        handle.bind(binding)
    except BaseException:
        handle.alone = False
        raise
    handle.model = weakref.ref(model)
    return binding


def _agree(
    model: torch.nn.Module, handle: CommHook, binding: Binding, options: AttachOptions, check: RankCheck | None
) -> None:
    """Compare the ranks of the binding's group, unless the user has turned that off. Ranks need the same check."""
    refuse_lost(binding.group)
    handle.agreement_timeout = options.timeout if options.verify_ranks else None
    if options.verify_ranks and not handle.alone and binding.engine is not None:
        binding.engine.open_levels()  # first, because the ranks compare plans, which depend on the nodes
    if check is not None:
        _check_ranks(handle, binding, check)
    if options.verify_ranks:
        facts = {"check_ranks_every, on_drift": [f"{check.every}, {check.on_drift}" if check is not None else ""]}
        watched = options.optimizer is not None or options.scaler is not None
        verify(handle, rows_of_model(model, binding), options.timeout, watched=watched, facts=facts)


def _log_attached(model: torch.nn.Module, handle: CommHook, binding: Binding) -> None:
    """Log the hook, its bytes and its state on rank 0, and its costs with this model."""
    if handle.alone:
        _warn_alone(handle.expr)
    elif (never := never_compresses(handle.expr, binding)) is not None:
        log.warning("%s", never)
    if not leads(binding.process_groups, binding.engine):
        return
    for caution in handle.cautions():
        log.warning("[rank 0] %s", caution)
    if log.isEnabledFor(logging.INFO):  # the sentence plans every bucket
        log.info("%s", start_line(handle, model))


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
    if options.link is not None:
        raise HookNotSupportedError(
            "link= posts receives ahead, which needs ranks that stay, and a manager's members join and leave. Omit link="
        )


@functools.cache
def _warn_alone(expr: str) -> None:
    log.warning(
        "one process: %s has no peer, so it compresses nothing. attach(..., single_process=True) compresses anyway",
        expr,
    )
