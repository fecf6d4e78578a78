"""Whose turn it is on the replicate axis: all ranks reduce the same groups in the same order, each once a step.

torch hands over a group's gradients whenever a backward has come that far: not at all where a replica did not use the
group (experts), and once for each use where it used it several times (shared weights). Ranks that reduced at every call
would average one group with another, and compress two parts of one gradient as if they were two steps. So each group
has its turn, in an order agreed once. What comes before its turn, or is not all of the gradient yet, is put off; at
the end the rest follows, zeros for groups that this rank did not use.

A group is put off by leaving zeros for torch to add, and adding the average later.
"""

from collections.abc import Sequence

import torch

from ch_fsdp.torch_internals import ParamGroup
from commhooks import Bucket, HookResultError
from commhooks.adapters import Engine


class Turns:
    """The groups of one model, and how far the present step has come.

    The first step puts off everything: after it the ranks agree on the order in which the first of them was called.

    Args:
        groups: by index, on every rank the same.
        fixed: from the last group to the first, agreed with nobody: where ranks come and go, one that comes later was
            not there when the others agreed.

    Attributes:
        gone: groups that another handle reduces by now: they have no turn here any more.
    """

    def __init__(self, groups: Sequence[ParamGroup], *, fixed: bool = False) -> None:
        self.groups = groups
        self.gone: set[int] = set()
        self._streams: set[torch.cuda.Stream] = set()  # on which torch has handed over; few, and always the same
        self._order = list(reversed(range(len(groups)))) if fixed else list(range(len(groups)))
        self._agreed = fixed
        self._most = [0] * len(groups)  # calls of each in one step so far: a step with fewer waits for its end
        self.reset()

    def reset(self) -> None:
        """Drop what earlier backwards have kept back, too, as ``reset_iter_state()`` does."""
        self._kept_back: dict[int, torch.Tensor] = {}
        self.forget()

    def forget(self) -> None:
        """Begin a step anew. What ``set_requires_all_reduce(False)`` has kept back of earlier backwards stays."""
        self._calls = [0] * len(self.groups)
        self._recent: dict[int, None] = {}  # in the order of their last calls
        self._put_off: dict[int, torch.Tensor] = {}
        self._whole: set[int] = set()  # of those, which nothing can be added to any more
        self._done: set[int] = set()
        self._late: dict[int, torch.Tensor] = {}  # averages that torch has not been given
        for group in self.groups:
            group.release_hooks()

    @property
    def keeps_back(self) -> bool:
        """Whether gradients wait for a backward with ``set_requires_all_reduce(True)``."""
        return bool(self._kept_back)

    @property
    def due(self) -> bool:
        """Whether some group is reduced in this backward at all; follows from what the user has set, on all ranks."""
        return any(map(self._reduces, self._order))

    def take(self, engine: Engine, index: int, shard: torch.Tensor, *, at_end: bool) -> Exception | None:
        """Reduce a group's gradients if it has its turn, or put them off.

        Args:
            engine: the replicate axis's.
            index: of the group.
            shard: flat and padded; torch adds what is left in it to the parameters' gradients.
            at_end: whether everything waits for the end: further passes of autograd may follow in this backward, or
                other handles reduce in it too, and only the order of their ends is the same on all ranks.

        Returns:
            why it cannot be reduced: to be raised after the backward, which FSDP2 would never end otherwise.
        """
        group = self.groups[index]
        if shard.is_cuda:
            self._streams.add(torch.cuda.current_stream(shard.device))
        self._calls[index] += group.all_reduces
        if index in self._done:
            shard.zero_()
            return HookResultError(
                f"{group.name} was handed over by FSDP2 after its gradient had been reduced in this step. "
                "If an exception ended an earlier backward, call reset_iter_state() on the model before going on; if a "
                "backward came between two forwards that share another, run one backward for all of them"
            )
        if not group.all_reduces:
            self._keep_back(index, shard)
            return None
        self._recent.pop(index, None)
        self._recent[index] = None
        earlier = _sum(self._put_off.pop(index, None), self._kept_back.pop(index, None))
        calls = self._calls[index]
        whole = self._agreed and not at_end and calls >= self._most[index] and not group.may_call_again(calls)
        if whole and index == self._next():
            group.release_hooks()
            self._reduce(engine, index, shard if earlier is None else shard.add_(earlier))
            self._go_on(engine)
            return None
        group.hold_hooks()
        self._put_off[index] = shard.clone() if earlier is None else earlier.add_(shard)
        shard.zero_()
        if whole:
            self._whole.add(index)
        return None

    def _keep_back(self, index: int, shard: torch.Tensor) -> None:
        """Sum up what is not to be reduced between the replicas yet; torch adds zeros for now."""
        self.groups[index].hold_hooks()
        earlier = self._kept_back.get(index)
        self._kept_back[index] = shard.clone() if earlier is None else earlier.add_(shard)
        shard.zero_()

    def finish(self, engine: Engine) -> list[str]:
        """The backward has ended: every group that has not had its turn has it now.

        Returns:
            whom an average has been given that torch itself did not add.
        """
        # On these streams torch also adds what the hook has left, after the hook; and unless it is told that this
        # backward is the last it waits for them no more than for late averages reduced there.
        for stream in self._streams:
            torch.cuda.current_stream(stream.device).wait_stream(stream)
        while (index := self._next()) is not None:
            self._reduce_late(engine, index)
        for index, average in self._late.items():
            if average.is_cuda:
                average.record_stream(torch.cuda.current_stream(average.device))
            self.groups[index].give(average)
        given = [self.groups[index].name for index in self._late]
        self._most = [max(pair) for pair in zip(self._most, self._calls, strict=True)]
        if not self._agreed and self.due:
            self._agree(engine)
        self.forget()
        return given

    def _agree(self, engine: Engine) -> None:
        """Take the first rank's order of calls; once, and on CUDA the only time that the host waits."""
        mine = [*self._recent, *(index for index in self._order if index not in self._recent)]
        self._order = [int(index) for index in engine.gather(torch.tensor(mine, dtype=torch.int64, device="cpu"))[0]]
        self._agreed = True

    def _next(self) -> int | None:
        left = (i for i in self._order if i not in self._done and self._reduces(i))
        return next(left, None)

    def _reduces(self, index: int) -> bool:
        group = self.groups[index]
        return index not in self.gone and group.reduces and group.all_reduces and group.trainable

    def _go_on(self, engine: Engine) -> None:
        while (index := self._next()) is not None and index in self._whole:
            self._reduce_late(engine, index)

    def _reduce_late(self, engine: Engine, index: int) -> None:
        group = self.groups[index]
        shard = _sum(self._put_off.pop(index, None), self._kept_back.pop(index, None))
        if shard is None:
            dtype = group.reduce_dtype
            shard = torch.zeros(group.shards(dtype).numel, dtype=dtype, device=group.device)
        self._late[index] = shard
        self._reduce(engine, index, shard)

    def _reduce(self, engine: Engine, index: int, shard: torch.Tensor) -> None:
        self._done.add(index)
        group = self.groups[index]
        engine.run(Bucket(group.shards(shard.dtype), shard, index))
        if group.replicas_in_factor != 1:
            shard.mul_(group.replicas_in_factor)


def _sum(a: torch.Tensor | None, b: torch.Tensor | None) -> torch.Tensor | None:
    return a.add_(b) if a is not None and b is not None else (a if a is not None else b)
