"""Order of FSDP2's parameter groups in a reduction between replicas, equal on all ranks.

torch hands over a group's gradients whenever a backward is ready. It never does so if a replica did not use the group
(experts), and does so once for each use of shared weights. If ranks reduced at every call, they would mix gradients of
different groups, and compress two parts of one gradient as two steps. So :class:`GroupOrder` reduces each group once a
step, in an order that all ranks agreed on. A group that is early or incomplete leaves zeros for torch to add. Its
average is added later.
"""

from collections.abc import Sequence

import torch

from ch_core import Engine, record_use
from ch_fsdp.torch_internals.param_groups import ParamGroup
from commhooks import Bucket, HookResultError


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
