"""Manager-backed DistributedDataParallel: DDP's reducer, with every collective over the manager.

The reducer must lay out its buckets alike in every iteration and on every member, a newly started one included.
DDP rebuilds them after its first iteration unless it looks for unused parameters, so that is always switched on.
"""

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import commhooks
from ch_ddp.adapter import Finalizer, acquire_slot, averaged
from ch_ft.ddp_drivers import PlainDriver
from ch_ft.failfast import FailFast
from ch_ft.plain_average import Averaging
from ch_ft.protocols import Abortable, Manager, Reducer
from ch_ft.used_params import GroupOfOne, UsedParams
from commhooks import AttachError, CommHook, HookConfigError, HookNotSupportedError, Reduction

_OVER_A_FIXED_GROUP = ("broadcast_buffers", "forward_sync_buffers", "delay_all_reduce_named_params")


class DistributedDataParallel(TorchDDP):
    """DDP that goes on when members die, with torchft's name and signature.

    Averages over the participants of each step. A lost peer never raises: the step is not committed and is tried
    again. Parameters and optimizer must be part of what the manager transfers.

    Args:
        manager: torchft's Manager; for plain averaging any :class:`~ch_ft.Reducer` will do.
        module: the module to train.
        hook: what :func:`commhooks.attach` takes: ``"powersgd(rank=4)"``, ``"bf16_compress"`` ... Without it, plain
            averaging.
        process_group: the group that was given to the manager. With it, a member that notices a failure closes its
            connections, so that the others notice at once instead of after the group's time-out.
        fail_fast: ``False`` leaves the others to the group's time-out.
        **kwargs: DDP's own, e.g. ``bucket_cap_mb``. Equal on all members.

    Attributes:
        handle: the attached hook, or ``None``.
        averaged: names of the parameters that are averaged.

    Raises:
        HookConfigError: ``static_graph=True`` or ``find_unused_parameters=False``, under which buckets change from
            one iteration to the next; ``broadcast_buffers=True`` or ``delay_all_reduce_named_params``, which go over
            a process group of fixed ranks.
        HookNotSupportedError: the hook needs more than all-reduce.

    A parameter thawed or added after wrapping is an error of the next forward.

    Example:
        >>> import torch
        >>> from ch_ft import OptimizerWrapper, SimulatedCluster
        >>> with SimulatedCluster() as cluster:
        ...     manager = cluster.join("a")
        ...     model = DistributedDataParallel(manager, torch.nn.Linear(2, 1))
        ...     optimizer = OptimizerWrapper(manager, torch.optim.SGD(model.parameters(), lr=0.1))
        ...     optimizer.zero_grad()
        ...     model(torch.ones(1, 2)).sum().backward()
        ...     optimizer.step()
        True
    """

    def __init__(
        self,
        manager: Reducer,
        module: torch.nn.Module,
        *,
        hook: str | Mapping[str, Any] | Reduction | Callable[..., Any] | CommHook | None = None,
        process_group: Abortable | None = None,
        fail_fast: bool = True,
        **kwargs: Any,
    ) -> None:
        if kwargs.get("static_graph") or not kwargs.pop("find_unused_parameters", True):
            raise HookConfigError(
                "static_graph=True and find_unused_parameters=False let DDP rebuild its buckets after the first "
                "iteration; a replica that joins later would reduce other buckets than the rest. Leave both at their "
                "defaults here"
            )
        refused = [name for name in _OVER_A_FIXED_GROUP if kwargs.get(name)]
        if refused:
            raise HookConfigError(
                f"{', '.join(refused)}: DDP does this over its own process group, which reaches no other member here, so "
                "buffers or gradients would differ between members. Leave it out; a healing member receives buffers in "
                "the state dict that its manager transfers"
            )
        group = GroupOfOne()
        super().__init__(module, process_group=group, find_unused_parameters=True, **kwargs)
        self.used = group.used = UsedParams([parameter for _, parameter in averaged(self)])
        self.manager = manager
        self.fail_fast = FailFast(manager, process_group, fail_fast)
        self.handle: CommHook | None = None
        self.averaged = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
        self.register_forward_pre_hook(_refuse_thawed)
        acquire_slot(self, self.plain)
        if hook is not None:
            self.handle = commhooks.attach(self, cast(Any, hook))

    def plain(self) -> PlainDriver:
        """What the trampoline calls while no hook is attached."""
        return PlainDriver(Averaging(self.manager, self.fail_fast), self.used, Finalizer.of(self))

    def join(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse torch's context for uneven inputs: it needs a fixed set of ranks.

        Raises:
            HookNotSupportedError: always.
        """
        raise HookNotSupportedError(
            "join() needs a fixed set of ranks, and the members of a manager change. Leave it out: a member that has no "
            "more input calls manager.shutdown(), and the next quorum forms without it"
        )

    def full_manager(self) -> Manager:
        """The manager, as what a hook needs.

        Raises:
            HookConfigError: it lacks a method that hooks need and plain averaging does not.
        """
        needed = ("num_participants", "is_participating", "participating_rank", "current_step")
        missing = [name for name in (*needed, "register_state_dict_fn") if not hasattr(self.manager, name)]
        if missing:
            raise HookConfigError(
                f"{type(self.manager).__name__} lacks {', '.join(missing)}: it can average plainly, but a hook needs "
                "ch_ft.Membership and ch_ft.Transaction as well. Give torchft's Manager or a SimulatedManager"
            )
        return cast(Manager, self.manager)


def _refuse_thawed(model: torch.nn.Module, inputs: object) -> None:
    """DDP averages what required a gradient when it was made; of the rest each member would keep its own gradient."""
    assert isinstance(model, DistributedDataParallel)  # noqa: S101 - the hook is registered on no other
    if not (torch.is_grad_enabled() and model.require_backward_grad_sync):
        return
    known = model.averaged | set(model.parameters_to_ignore)
    thawed = [name for name, p in model.module.named_parameters() if p.requires_grad and name not in known]
    if thawed:
        raise AttachError(
            f"{', '.join(thawed[:3])}{' ...' if len(thawed) > 3 else ''}: thawed or added after the model was wrapped. "
            "DDP averages what required a gradient then, and the members would drift apart: wrap model.module anew "
            "on all members, after thawing"
        )
