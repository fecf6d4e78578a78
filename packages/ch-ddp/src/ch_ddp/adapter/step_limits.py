"""Limits of a step, as a driver derives them from DDP's calls of the hook."""

from collections.abc import Callable

from ch_ddp.adapter.futures import behind_backward
from commhooks import NO_BACKWARD, GradBucket, at_end_of_backward, backward_id, if_interrupted


class StepLimits:
    """Tells a driver where a step begins and ends. DDP announces neither.

    - A step begins with the first call after the end of the last step. It also begins if the index of the bucket does not
      grow: then an earlier backward raised before its last bucket.
    - A step ends with the bucket that DDP marks as the last. DDP marks none in the first iteration of a static graph. It skips
      an unused last bucket under ``skip_all_reduce_unused_params``, and a user's hook may keep the last bucket for itself.
      Then the step ends with the backward.

    Args:
        may_miss_last: True if the last bucket of a step may never arrive, even if the graph is not static.
        skips_after: returns True if DDP skips all buckets after this index. If the last bucket that it does not skip arrives in a
            nested backward, such as that of a reentrant checkpoint, DDP ends the step with this backward.
    """

    def __init__(self, *, may_miss_last: bool, skips_after: Callable[[int], bool] | None = None) -> None:
        self._may_miss_last, self._skips_after = may_miss_last, skips_after
        self._index: int | None = None  # index of the newest bucket; None between steps
        self._task = NO_BACKWARD  # id of the backward of the newest bucket

    @property
    def open(self) -> bool:
        """True between the first bucket of a step and its end."""
        return self._index is not None

    def begins(self, index: int) -> bool:
        """Return True if a bucket of this index is the first of a step.

        The first index is not always 0, because DDP or a user's hook may leave out some buckets. All buckets of a call after the
        graph have index 0, so the id of the backward tells them apart.
        """
        if self._index is None:
            return True
        return index <= self._index and not (behind_backward() and self._task == backward_id())

    def enter(self, bucket: GradBucket, end: Callable[[], None], interrupt: Callable[[], None] | None = None) -> bool:
        """Take the next bucket. Return True if it begins a step.

        Args:
            bucket: DDP's bucket.
            end: ends the step with the backward, if the step is still :attr:`open`. DDP waits for the futures after that.
            interrupt: drops the step if an exception ends the backward.
        """
        index, task, begins = bucket.index(), backward_id(), self.begins(bucket.index())
        if (begins or task != self._task) and task != NO_BACKWARD:
            if interrupt is not None:
                if_interrupted(interrupt)
            if self._may_miss_last or behind_backward():
                at_end_of_backward(end, nested=self._ends_nested)
        self._index, self._task = index, task
        return begins

    def leave(self) -> bool:
        """End the step. Return False if none is open."""
        was_open, self._index = self.open, None
        return was_open

    def _ends_nested(self) -> bool:
        return self._index is not None and self._skips_after is not None and self._skips_after(self._index)
