"""FSDP2's replicate axis: any reduction, on the shards, between ranks with the same shard.

torch calls ``hook(shard)`` after its reduce-scatter and adds the shard to the parameters' gradients afterwards. The hook
sees a flat tensor without names. A shard's name is its parameter's name and coordinate, ``"blocks.0.up.weight[0/2]"``, and
the state uses it as key.

torch hands over a group's gradients whenever a backward is ready. It never does so if a replica did not use the group
(experts), and does so once for each use of shared weights. If ranks reduced at every call, they would mix gradients of
different groups, and compress two parts of one gradient as two steps. So :class:`GroupOrder` reduces each group once a
step, in an order that all ranks agreed on. A group that is early or incomplete leaves zeros for torch to add. Its
average is added later.
"""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from ch_core import Engine, record_use
from ch_fsdp.steps import Steps
from ch_fsdp.torch_internals.backward_end import BackwardEnd
from ch_fsdp.torch_internals.param_groups import ParamGroup
from commhooks import AttachError, Bucket, HookNotSupportedError, HookResultError, SlotTakenError


class ReplicateHook:
    """The function in FSDP2's all-reduce slot. After ``detach()`` it stays and averages plainly.

    Args:
        group: the parameter group.
        index: position of the group in ``order``.
        order: the groups of the model.
        steps: the handle's engines.
        end: the end of a backward.
        expr: the attached hook.
    """

    def __init__(
        self, group: ParamGroup, index: int, order: "GroupOrder", steps: Steps, end: BackwardEnd, expr: str
    ) -> None:
        self.group, self.index, self.order = group, index, order
        self.switch(steps, end, expr)
        self._before: object = group.hook  # None, or the plain averaging of a detached handle
        if isinstance(self._before, ReplicateHook):
            self._before.order.released.add(self._before.index)
        group.hook = self

    @property
    def in_place(self) -> bool:
        return self.group.hook is self

    def switch(self, steps: Steps, end: BackwardEnd, expr: str | None) -> None:
        """Run another reduction from now on. ``expr`` is ``None`` for plain averaging after ``detach()``."""
        self.steps, self.end, self.expr, self.called = steps, end, expr, False

    def keep(self) -> None:
        """Drop the earlier hook, because the ranks agreed on this one."""
        before, self._before = self._before, None
        if isinstance(before, ReplicateHook) and before.order.all_released:
            before.end.close()  # not earlier: the groups of the earlier handle share it

    def remove(self) -> None:
        """Put the earlier hook back into the slot."""
        if isinstance(self._before, ReplicateHook):
            self._before.order.released.discard(self._before.index)
        if self.in_place:
            self.group.hook = self._before

    def __call__(self, shard: torch.Tensor) -> None:
        """Reduce ``shard`` in place: flat, padded shards of the group's trainable parameters."""
        self.called = True
        self.steps.before_gradient()
        engine = self.steps.group.engines["replicate"]
        refusal = self._refusal(shard, engine)
        if refusal is None:
            record_use(shard)  # torch allocated it on the stream of its reduce-scatter
            self.steps.calls += 1
            refusal = self.order.take(engine, self.index, shard, at_end=self.end.manual or self.end.shared)
        if refusal is not None:
            self.steps.fail(refusal)

    def _refusal(self, shard: torch.Tensor, engine: Engine) -> Exception | None:
        if not self.group.all_reduces and engine.transport.elastic:
            return HookNotSupportedError(  # the kept gradients would outlive an attempt that the manager dropped
                f"{self.group.name}: set_requires_all_reduce(False) does not work with manager=, because the manager may "
                "drop a step. Accumulate with set_requires_gradient_sync(False) instead"
            )
        expected = self.group.shards(shard.dtype).numel
        if expected != shard.numel():
            return HookResultError(
                f"{self.group.name}: FSDP2 gave {shard.numel()} elements, its trainable parameters have {expected} on "
                "this rank: some had no gradient. Call set_reduce_scatter_unused_params(True), or upgrade torch"
            )
        return None


class GroupOrder:
    """The parameter groups of one model, the order of their reductions, and the state of the present step.

    In the first step every group waits for the end. Then the ranks agree on the order of the first rank's calls.

    Args:
        groups: the groups, in the same order on every rank.
        fixed: True for the order from the last group to the first, without an agreement. With a manager, a member that
            joins later did not see the agreement.

    Attributes:
        released: indices of groups that another handle now reduces.
        late: names of groups that ever received an average from this class instead of from torch.
    """

    def __init__(self, groups: Sequence[ParamGroup], *, fixed: bool = False) -> None:
        self.groups = groups
        self.released: set[int] = set()
        self.late: set[str] = set()
        self._streams: set[torch.cuda.Stream] = set()  # on which torch called the hook in this or an interrupted step
        self._order = list(reversed(range(len(groups)))) if fixed else list(range(len(groups)))
        self._agreed = fixed
        self._most_calls = [0] * len(groups)  # in one step; with fewer calls a group may be incomplete
        self.forget(reset=True)

    def forget(self, *, reset: bool = False) -> None:
        """Begin a new step.

        Args:
            reset: also drop gradients that ``set_requires_all_reduce(False)`` kept, as ``reset_iter_state()`` does.
        """
        if reset:
            self._kept: dict[int, torch.Tensor] = {}
        self._calls = [0] * len(self.groups)
        self._recent: dict[int, None] = {}  # groups in the order of their last calls
        self._waiting: dict[int, torch.Tensor] = {}
        self._complete: set[int] = set()  # waiting groups whose gradient is complete
        self._done: set[int] = set()
        self._averages: dict[int, torch.Tensor] = {}  # averages that torch will not add
        for group in self.groups:
            group.resume_param_hooks()

    @property
    def all_released(self) -> bool:
        return len(self.released) == len(self.groups)

    @property
    def keeps_gradients(self) -> bool:
        """True if gradients wait for a backward with ``set_requires_all_reduce(True)``."""
        return bool(self._kept)

    @property
    def due(self) -> bool:
        """True if this backward reduces any group. That follows from the user's settings, equal on all ranks."""
        return any(map(self._reduces, self._order))

    @torch.no_grad()
    def take(self, engine: Engine, index: int, shard: torch.Tensor, *, at_end: bool) -> Exception | None:
        """Reduce a group's gradients if it is the next group, or let them wait.

        Args:
            engine: engine of the replicate axis.
            index: position of the group.
            shard: flat and padded. torch adds the result to the parameters' gradients.
            at_end: True if everything waits for the end of the backward. More passes of autograd may follow, or other
                handles reduce in this backward, and ranks agree only on the order of their ends.

        Returns:
            The error to raise after the backward. FSDP2 could not end the backward if the hook raised.
        """
        group = self.groups[index]
        if shard.is_cuda:
            self._streams.add(torch.cuda.current_stream(shard.device))
        self._calls[index] += group.all_reduces
        if index in self._done:
            shard.zero_()
            return HookResultError(
                f"FSDP2 handed over the gradient of {group.name} after it had been reduced in this step. If an exception "
                "ended an earlier backward, call reset_iter_state() on the model. If a backward came between two forwards "
                "that share a third, run one backward for all of them"
            )
        if not group.all_reduces:
            self._keep(index, shard)
            return None
        self._recent.pop(index, None)
        self._recent[index] = None
        earlier = _sum(self._waiting.pop(index, None), self._kept.pop(index, None))
        calls = self._calls[index]
        complete = self._agreed and not at_end and calls >= self._most_calls[index] and not group.may_call_again(calls)
        if complete and index == self._next():
            group.resume_param_hooks()
            self._reduce(engine, index, shard if earlier is None else shard.add_(earlier))
            while (following := self._next()) is not None and following in self._complete:
                self._reduce_late(engine, following)
            return None
        group.pause_param_hooks()
        self._waiting[index] = shard.clone() if earlier is None else earlier.add_(shard)
        shard.zero_()
        if complete:
            self._complete.add(index)
        return None

    @torch.no_grad()
    def finish(self, engine: Engine) -> None:
        """Reduce all groups that still wait, with zeros for groups that this rank did not use."""
        # torch adds the hook's result on these streams after the hook. It waits for them only if this is the last
        # backward, so without this line a late average could be added too early.
        for stream in self._streams:
            torch.cuda.current_stream(stream.device).wait_stream(stream)
        self._streams.clear()  # a caller's stream may be of one step only
        while (index := self._next()) is not None:
            self._reduce_late(engine, index)
        for index, average in self._averages.items():
            record_use(average)
            self.groups[index].add_to_gradients(average)
        self.late.update(self.groups[index].name for index in self._averages)
        self._most_calls = [max(pair) for pair in zip(self._most_calls, self._calls, strict=True)]
        if not self._agreed and self.due:
            self._agree(engine)
        self.forget()

    def _keep(self, index: int, shard: torch.Tensor) -> None:
        """Sum up gradients for a later backward. torch adds zeros for now."""
        self.groups[index].pause_param_hooks()
        earlier = self._kept.get(index)
        self._kept[index] = shard.clone() if earlier is None else earlier.add_(shard)
        shard.zero_()

    def _agree(self, engine: Engine) -> None:
        """Take the first rank's order of calls. On CUDA the host waits here, once."""
        mine = [*self._recent, *(index for index in self._order if index not in self._recent)]
        every = engine.gather(torch.tensor(mine, dtype=torch.int64, device="cpu"))  # (ranks, groups)
        self._order = [int(index) for index in every[0]]
        self._agreed = True

    def _next(self) -> int | None:
        return next((i for i in self._order if i not in self._done and self._reduces(i)), None)

    def _reduces(self, index: int) -> bool:
        group = self.groups[index]
        return index not in self.released and group.reduces and group.all_reduces and group.trainable

    def _reduce_late(self, engine: Engine, index: int) -> None:
        group = self.groups[index]
        shard = _sum(self._waiting.pop(index, None), self._kept.pop(index, None))
        if shard is None:
            dtype = group.reduce_dtype
            shard = torch.zeros(group.shards(dtype).numel, dtype=dtype, device=group.device)
        self._averages[index] = shard
        self._reduce(engine, index, shard)

    def _reduce(self, engine: Engine, index: int, shard: torch.Tensor) -> None:
        self._done.add(index)
        group = self.groups[index]
        engine.run(Bucket(group.shards(shard.dtype), shard, index))
        if group.replicas_in_factor != 1:
            shard.mul_(group.replicas_in_factor)


def _sum(a: torch.Tensor | None, b: torch.Tensor | None) -> torch.Tensor | None:
    return a.add_(b) if a is not None and b is not None else (a if a is not None else b)


def check_free(group: ParamGroup) -> None:
    """Check the all-reduce slot of a group.

    Raises:
        SlotTakenError: a handle is attached there, or the user set a hook.
        AttachError: a detached handle keeps gradients of ``set_requires_all_reduce(False)``.
    """
    hook = group.hook
    if isinstance(hook, ReplicateHook):
        if hook.expr is not None:
            raise SlotTakenError(f"{group.name} has {hook.expr} attached on its replicate axis: detach() it first")
        if hook.order.keeps_gradients:
            raise gradients_kept(group.name, "attaching")
    elif hook is not None:
        raise SlotTakenError(
            f"{group.name} has its own all-reduce hook ({getattr(hook, '__qualname__', hook)}; "
            "set_all_reduce_hook acts on one module only, not on those below it). Leave it out and attach to the "
            "whole model"
        )


def gradients_kept(name: str, before: str) -> AttachError:
    """Return the error for gradients that would never be reduced between the replicas."""
    return AttachError(
        f"{name} holds gradients that set_requires_all_reduce(False) has kept back: run a backward with "
        f"set_requires_all_reduce(True) before {before}"
    )


@torch.no_grad()
def broadcast(tensors: Iterable[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Copy tensors of the group's first rank to all replicas, as DDP does when it wraps a model."""
    carried = {pair.partition(":")[0] for pair in dist.get_backend_config(group).split(",")}  # of "cpu:gloo,cuda:nccl"
    for tensor in tensors:
        local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
        if local.numel() == 0:
            continue
        sent = local.contiguous() if local.device.type in carried else local.to(torch.accelerator.current_accelerator())
        dist.broadcast(sent, group=group, group_src=0)
        if sent is not local:
            local.copy_(sent)
