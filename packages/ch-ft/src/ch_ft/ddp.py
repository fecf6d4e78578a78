"""Fault-tolerant replacements of DDP: average gradients over a manager while members die and return.

DDP rebuilds its buckets after the first iteration unless it searches for unused parameters. A member that joins later
would then reduce other buckets than its peers. So :class:`DistributedDataParallel` always searches for them.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.distributed import ReduceOp
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.weak import WeakIdKeyDictionary

import commhooks
from ch_core import Loan, take_back
from ch_ddp import Finalizer, TensorFuture, acquire_slot, averaged_params, behind_backward, future_for, raise_finalized
from ch_ft.fail_fast import FailFast
from ch_ft.manager import Abortable, Manager, Membership, Reducer, Work
from ch_ft.used_params import GroupOfOne, UsedParams
from commhooks import (
    AttachError,
    CommHook,
    GradBucket,
    HookConfigError,
    HookNotSupportedError,
    Reduction,
    backward_id,
    if_interrupted,
)

_OVER_A_FIXED_GROUP = ("broadcast_buffers", "forward_sync_buffers", "delay_all_reduce_named_params")
_NEEDED_BY_HOOKS = (
    "num_participants",
    "is_participating",
    "participating_rank",
    "current_step",
    "register_state_dict_fn",
)


class DistributedDataParallel(TorchDDP):
    """DDP that trains on when members die. It has torchft's name and signature.

    It averages over the participants of each step. After the loss of a peer, ``backward()`` returns without an error,
    the step is not committed, and the next attempt repeats it. The manager must transfer parameters and optimizer to
    healing members.

    Args:
        manager: torchft's Manager. Plain averaging works with any :class:`~ch_ft.Reducer`.
        module: module to train.
        hook: first argument of :func:`commhooks.attach`, such as ``"powersgd(rank=4)"``. Without it, gradients are
            averaged plainly.
        process_group: process group of the manager. A member that notices a failure closes its connections, so that its
            peers notice at once. Without it they notice at the group's time-out.
        **kwargs: arguments of DDP, such as ``bucket_cap_mb``. All members need the same.

    Attributes:
        handle: attached hook, or ``None``.
        averaged: names of the averaged parameters.
        used: parameters that a step used.

    Raises:
        HookConfigError: ``static_graph=True`` or ``find_unused_parameters=False``, under which buckets change from
            one iteration to the next; ``broadcast_buffers=True`` or ``delay_all_reduce_named_params``, which go over
            a process group of fixed ranks; ``skip_all_reduce_unused_params=True``, under which a step has no last bucket.
        HookNotSupportedError: the hook needs a collective that the manager does not carry.

    A parameter that is thawed or added after wrapping raises ``AttachError`` in the next forward.

    Example:
        >>> import torch
        >>> from ch_ft import OptimizerWrapper
        >>> from ch_testing import SimulatedCluster
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
        module: nn.Module,
        *,
        hook: str | Mapping[str, Any] | Reduction | Callable[..., Any] | CommHook | None = None,
        process_group: Abortable | None = None,
        **kwargs: Any,
    ) -> None:
        if kwargs.get("static_graph") or not kwargs.pop("find_unused_parameters", True):
            raise HookConfigError(
                "static_graph=True and find_unused_parameters=False let DDP rebuild its buckets after the first iteration. "
                "A member that joins later would reduce other buckets than its peers. Leave both at their defaults"
            )
        refused = [name for name in _OVER_A_FIXED_GROUP if kwargs.get(name)]
        if refused:
            raise HookConfigError(
                f"{', '.join(refused)}: DDP does this over its own process group, which reaches no other member here, so "
                "buffers or gradients would differ between members. Leave it out; a healing member receives buffers in "
                "the state dict that its manager transfers"
            )
        if kwargs.get("skip_all_reduce_unused_params"):
            raise HookConfigError(
                "skip_all_reduce_unused_params=True lets DDP skip the last bucket, with which a step ends here. Its parameters "
                "must be unused on all members, and members do not compare them. Leave it out"
            )
        group = GroupOfOne()
        super().__init__(module, process_group=group, find_unused_parameters=True, **kwargs)
        self.used = group.used = UsedParams([parameter for _, parameter in averaged_params(self)])
        self.manager = manager
        self.fail_fast = FailFast(manager, process_group)
        self.handle: CommHook | None = None
        self.averaged = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
        self.register_forward_pre_hook(_refuse_thawed)
        acquire_slot(self, self.plain)
        if hook is not None:
            self.handle = commhooks.attach(self, cast(Any, hook))

    def plain(self) -> "PlainDriver":
        """Return the driver that averages while no hook is attached."""
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
        """Return the manager if it has all methods that hooks need.

        Raises:
            HookConfigError: it lacks one. The message names it.
        """
        missing = [name for name in _NEEDED_BY_HOOKS if not hasattr(self.manager, name)]
        if missing:
            raise HookConfigError(
                f"{type(self.manager).__name__} lacks {', '.join(missing)}: it can average plainly, but a hook needs "
                "ch_ft.Membership and ch_ft.Transaction too. Give torchft's Manager or a SimulatedManager"
            )
        return cast(Manager, self.manager)


class PureDistributedDataParallel(nn.Module):
    """Averages each gradient by one all-reduce over the manager. It has torchft's name and signature.

    It is simple and slow: use it for small models, for parameters that DDP cannot hold, and for comparison. All members
    must use the same parameters in the same order. A parameter that is thawed or added later is averaged from the next
    forward on. It takes no hook.

    torchft's class of this name starts its all-reduces and waits for none. The wait takes the mean, so replicas of
    torchft's class train on sums, on parts of sums, or on their own gradients. This class waits before ``backward()``
    returns.

    Args:
        manager: torchft's Manager, or any :class:`~ch_ft.Reducer`.
        module: module to train.
        process_group: see :class:`~ch_ft.DistributedDataParallel`.

    Example:
        >>> import torch
        >>> from ch_testing import SimulatedCluster
        >>> with SimulatedCluster() as cluster:
        ...     manager = cluster.join("a")
        ...     manager.start_quorum()
        ...     model = PureDistributedDataParallel(manager, torch.nn.Linear(2, 1))
        ...     model(torch.ones(1, 2)).sum().backward()
        ...     model.module.weight.grad
        tensor([[1., 1.]])
    """

    def __init__(
        self,
        manager: Reducer,
        module: nn.Module,
        *,
        process_group: Abortable | None = None,
    ) -> None:
        super().__init__()
        self.module = module
        self.averaging = Averaging(manager, FailFast(manager, process_group))
        self._backward = -1
        self._watched = WeakIdKeyDictionary()  # parameter -> True
        self._watch()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._watch()
        return self.module(*args, **kwargs)

    def _watch(self) -> None:
        """Watch parameters that require a gradient. Torch refuses such a hook on a frozen parameter."""
        for parameter in self.module.parameters():
            if parameter.requires_grad and parameter not in self._watched:
                parameter.register_post_accumulate_grad_hook(self._gradient_ready)
                self._watched[parameter] = True

    def _gradient_ready(self, parameter: torch.Tensor) -> None:
        backward = backward_id()
        if backward != self._backward:
            self._backward = backward
            if_interrupted(self.averaging.forget)
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)
        if parameter.grad is not None:
            self.averaging.start(parameter.grad)

    def _finish(self) -> None:
        self.averaging.finish()


class Averaging:
    """Plain averages of one backward. They start as gradients appear, and the end of the backward waits for them.

    It only calls ``manager.allreduce(tensor)``, with one exception. A manager sums before it divides, and the sum of
    two fp16 gradients of 40 000 is infinite. So fp16 is divided first.

    Args:
        manager: carries the all-reduces. For fp16 it needs :class:`~ch_ft.Membership`.
        fail_fast: called if an all-reduce fails.
    """

    def __init__(self, manager: Reducer, fail_fast: FailFast) -> None:
        self.manager = manager
        self.fail_fast = fail_fast
        self._in_flight: list[tuple[Work, Loan]] = []

    def start(self, tensor: torch.Tensor) -> None:
        """Start to average a tensor in place. All members must call it in the same order."""
        if tensor.dtype == torch.float16:
            tensor.mul_(1.0 / max(cast(Membership, self.manager).num_participants(), 1))
        loan = Loan(tensor)
        if tensor.dtype == torch.float16:
            work = self.manager.allreduce(loan.message, reduce_op=ReduceOp.SUM)
        else:
            work = self.manager.allreduce(loan.message)
        self._in_flight.append((work, loan))

    def finish(self) -> bool:
        """Wait for all averages and return True if none failed. After a failure the step will not be committed."""
        while self._in_flight:
            if self._in_flight[0][0].wait() is False or self.manager.errored() is not None:
                self.forget()
                self.fail_fast(None)
                return False
            self._in_flight.pop(0)[1].receive()
        return True

    def participating(self) -> bool:
        """Return True if this member's gradients count; False as well if the manager cannot tell."""
        asks = getattr(self.manager, "is_participating", None)
        return asks is not None and bool(asks())

    def forget(self) -> None:
        """Drop the averages in flight. A manager cannot tell which of them still write to their memory."""
        take_back(loan for _, loan in self._in_flight)
        self._in_flight.clear()


class PlainDriver:
    """Averages the buckets of a model without a hook. All of them travel while the backward runs.

    Args:
        averaging: averages of the backward.
        used: parameters that the model used. Its map travels with the last bucket.
        finalizer: finalizer of the model's backwards.
    """

    def __init__(self, averaging: Averaging, used: UsedParams, finalizer: Finalizer) -> None:
        self.averaging, self.used, self._finalizer = averaging, used, finalizer
        self.calls = 0
        self._futures: list[tuple[TensorFuture, torch.Tensor]] = []

    def __call__(self, bucket: GradBucket, /) -> TensorFuture:
        """Start one bucket. The last one completes the futures of all."""
        self.calls += 1
        if bucket.index() == 0:  # drop leftovers of a backward that raised
            self.averaging.forget()
            self.used.forget()
            self._futures.clear()
        buffer = bucket.buffer()
        future = future_for(buffer)
        self._futures.append((future, buffer))
        error = self._guarded(partial(self.averaging.start, buffer))
        if bucket.is_last() or behind_backward():
            error = self._guarded(partial(self._finish, buffer.device)) or error
            for done, reduced in self._futures:
                done.set_result(reduced)
            self._futures.clear()
            self._finalizer.last_bucket_arrived()
        if error is not None:
            raise_finalized(error)
        return future

    def _finish(self, device: torch.device) -> None:
        everywhere = self.used.map(device)  # (params,)
        self.averaging.start(everywhere)
        if self.averaging.finish():
            self.used.share(everywhere, self.averaging.participating())

    def _guarded(self, action: Callable[[], None]) -> Exception | None:
        """Return an exception instead of raising it. DDP would not recover from one that leaves its hook."""
        try:
            action()
        except Exception as error:  # the quorum timed out, so this member is out
            self.averaging.forget()
            return error
        return None


def _refuse_thawed(model: nn.Module, inputs: object) -> None:
    """Refuse parameters that DDP does not average, because each member would keep its own gradient of them."""
    assert isinstance(model, DistributedDataParallel)  # noqa: S101 - the hook is registered on no other
    if not (torch.is_grad_enabled() and model.require_backward_grad_sync):
        return
    known = model.averaged | set(model.parameters_to_ignore)
    thawed = [name for name, p in model.module.named_parameters() if p.requires_grad and name not in known]
    if thawed:
        raise AttachError(
            f"{', '.join(thawed[:3])}{' ...' if len(thawed) > 3 else ''}: thawed or added after the model was wrapped. "
            "DDP averages only parameters that required a gradient then, so members would drift apart. Wrap model.module "
            "again on all members, after thawing"
        )
