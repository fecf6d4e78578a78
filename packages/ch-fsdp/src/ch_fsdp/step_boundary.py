"""The step of an FSDP model: engines that run each bucket at once, and end together when FSDP ends a backward.

FSDP has no last call: the root's group fires before the first layer's, and which one is last depends on the graph. A
pass of autograd is no measure either (``private_ends``). So the adapter says when FSDP has ended a backward.
"""

from collections.abc import Callable

import torch

from ch_fsdp.turns import Turns
from commhooks import Bucket
from commhooks.adapters import (
    NO_BACKWARD,
    Engine,
    EngineGroup,
    Transport,
    after_backward,
    backward_id,
    raise_after_backward,
)


class Steps:
    """The engines of one handle, by axis.

    Args:
        engines: ``"shard"``, ``"replicate"`` or both, in the order in which they end.
        inspect: called at the end of each step; gives an error of this rank to be made known to the others.
        relay: the shard axis, if nothing of ours ends a step there last: what went wrong between the replicas of
            one shard is passed on along it, so that every rank of the mesh raises.
        turns: in which order groups are reduced between replicas (FSDP2).
        due: whether this backward is a step even if nothing has called.
    """

    def __init__(
        self,
        engines: dict[str, Engine],
        inspect: Callable[[], BaseException | None] = lambda: None,
        relay: Transport | None = None,
        turns: Turns | None = None,
        due: Callable[[], bool] = lambda: False,
    ) -> None:
        self.group = EngineGroup(engines, relay)
        self.calls = 0
        self._inspect, self._turns, self._due = inspect, turns, due
        self._kept: BaseException | None = None
        self._ending = NO_BACKWARD  # the pass of autograd at whose end the step ends
        self.given: set[str] = set()  # groups whose average torch did not add itself

    def run(self, axis: str, bucket: Bucket) -> None:
        """Reduce a bucket over an axis, now. Errors of the reduction are raised when the backward has ended."""
        self.calls += 1
        self.group.run(axis, bucket)

    def take(self, index: int, shard: torch.Tensor, *, at_end: bool) -> None:
        """Reduce a group's shard between the replicas when it has its turn."""
        assert self._turns is not None  # noqa: S101 - a replicate axis has them
        self.calls += 1
        with torch.no_grad():
            refusal = self._turns.take(self.group.engines["replicate"], index, shard, at_end=at_end)
        if refusal is not None:
            self.keep(refusal)

    def part_with(self, index: int, *, back: bool = False) -> None:
        """A group is reduced by another handle from now on; or is not, with ``back``."""
        assert self._turns is not None  # noqa: S101 - a replicate axis has them
        (self._turns.gone.discard if back else self._turns.gone.add)(index)

    @property
    def deserted(self) -> bool:
        """Whether no group is left to reduce between the replicas."""
        return self._turns is not None and len(self._turns.gone) == len(self._turns.groups)

    def keep(self, error: BaseException) -> None:
        """An error that must not stop the backward half way: raised, on every rank, when it has ended."""
        self._kept = self._kept or error

    def end(self) -> None:
        """FSDP has ended a backward: the step ends as soon as nothing else is to be done for it.

        Parts of the model that are called one by one each end theirs, in one pass of autograd: one step.
        """
        task = backward_id()
        if task == NO_BACKWARD or task != self._ending:
            self._ending = task
            after_backward(self._end)

    def abandon(self, *, reset: bool = False) -> None:
        """Forget a step whose backward was cut short by an exception.

        Args:
            reset: forget what has been kept back of earlier backwards, too.
        """
        self._kept = None
        if self._turns is not None:
            (self._turns.reset if reset else self._turns.forget)()
        self.group.abandon()

    @property
    def keeps_back(self) -> bool:
        """Whether gradients wait for a backward with ``set_requires_all_reduce(True)``."""
        return self._turns is not None and self._turns.keeps_back

    @property
    def open(self) -> bool:
        """Whether something of a step has come that has not ended."""
        return self._kept is not None or self.group.in_step

    def _end(self) -> None:
        if not (self.open or self._due()):
            return
        error, self._kept = self._kept or self._inspect(), None
        if self._turns is not None:
            with torch.no_grad():
                self.given.update(self._turns.finish(self.group.engines["replicate"]))
        error = self.group.finish(outside=error)
        if error is not None:
            raise_after_backward(error)
