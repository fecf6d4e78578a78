"""The buckets of a checkpoint, for hooks whose results depend on the buckets."""

from collections.abc import Sequence

import torch

from commhooks import Bucket, BucketLayout, HookState, ParamLayout

Places = Sequence[tuple[ParamLayout, Bucket]]
"""Parameters, and the bucket of DDP's that each lies in."""


class SavedBuckets:
    """Runs the first step of a driver on the buckets of the step before the checkpoint.

    DDP rebuilds its buckets after the first iteration of a process. A resumed process would therefore run one step on other
    buckets than the process that saved. A hook that treats a bucket as one vector would give other results.

    Args:
        state: state that holds the buckets of the last step, and receives the buckets of each new step.
    """

    def __init__(self, state: HookState) -> None:
        self._state = state
        self._open = True  # no step has ended here
        self._layouts: list[BucketLayout] = []  # of this step
        self._last: list[BucketLayout] = []  # of the step before
        self._recorded: tuple[tuple[str, ...], ...] | None = None  # their names; a load replaces them in the state
        self._held: list[Bucket] = []
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []  # a gradient in DDP's bucket, and its average

    def begin(self) -> None:
        """Forget an earlier step that never ended."""
        self._layouts, self._held, self._pairs = [], [], []

    def hold(self, bucket: Bucket) -> bool:
        """Return True if ``bucket`` waits until all have come, because the checkpoint has other buckets from here on."""
        number = len(self._layouts)
        self._layouts.append(bucket.layout)
        saved = self._state.identity.buckets[number : number + 1]
        if self._held or (self._open and saved and saved[0] != _names(bucket.layout)):
            self._held.append(bucket)
            return True
        return False

    @property
    def holds(self) -> bool:
        """True if a bucket waits."""
        return bool(self._held)

    def release(self) -> list[Bucket]:
        """Return the checkpoint's buckets with the gradients of the waiting buckets, or the waiting buckets if their
        parameters differ.
        """
        held, self._held = self._held, []
        if not held:
            return []
        first = len(self._layouts) - len(held)
        groups = self._state.identity.buckets[first:]
        places = {p.name: (p, bucket) for bucket in held for p in bucket.params}
        if sorted(places) != sorted(name for group in groups for name in group):
            return held
        filled = [[places[name] for name in group] for group in groups]
        if not all(_one_bucket(group) or _fit_together(group) for group in filled):
            return held
        self._layouts = []  # the state has these buckets already
        last = len(self._state.identity.buckets) - 1
        return [self._made(group, number, number == last) for number, group in enumerate(filled, first)]

    def finish(self) -> None:
        """Copy the averages to DDP's buckets, and record the buckets of the step."""
        for given, average in self._pairs:
            given.copy_(average)
        self._open, self._pairs = False, []
        layouts, self._layouts = self._layouts, []
        if layouts and (
            self._state.identity.buckets is not self._recorded
            or len(layouts) != len(self._last)
            or any(a is not b for a, b in zip(layouts, self._last, strict=True))
        ):
            self._last = layouts
            self._state.identity.buckets = self._recorded = tuple(map(_names, layouts))

    def _made(self, places: Places, index: int, is_last: bool) -> Bucket:
        unused = frozenset(p.name for p, bucket in places if p.name in bucket.unused)
        if _one_bucket(places):
            return Bucket(places[0][1].layout, places[0][1].storage, index, is_last, unused)
        gradients = [bucket.storage.narrow(0, p.offset, p.numel) for p, bucket in places]
        storage = torch.cat(gradients)
        params, offset = [], 0
        for p, _ in places:
            params.append(ParamLayout(p.name, p.shape, p.stride, offset, p.kind))
            offset += p.numel
        self._pairs += zip(gradients, storage.split([p.numel for p in params]), strict=True)
        return Bucket(BucketLayout(params, offset, storage.dtype, storage.device), storage, index, is_last, unused)


def _names(layout: BucketLayout) -> tuple[str, ...]:
    return tuple(p.name for p in layout.params)


def _one_bucket(places: Places) -> bool:
    """Return True if these are all parameters of one bucket, in its order."""
    return tuple(p.name for p, _ in places) == _names(places[0][1].layout)


def _fit_together(places: Places) -> bool:
    """Return True if the parameters can lie in one bucket."""
    kinds = {(bucket.dtype, bucket.device, bucket.storage.is_sparse) for _, bucket in places}
    return len(kinds) == 1 and not places[0][1].storage.is_sparse
