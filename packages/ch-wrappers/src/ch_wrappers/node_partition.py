"""Partition of a bucket among the ranks of a node: each rank owns some elements of the node's sum.

*Elements*: every rank owns an equal run of the bucket. *Rows*: every rank owns whole parameters, balanced by their elements. A
parameter is cut between rows of its matrix only while one rank would own more than :data:`TOLERATED` times its share. Each cut
makes a low-rank method send one more right factor, as large as the matrix has columns. So if the factors of the bucket would
grow by more than :data:`EXTRA`, a rank may own up to :data:`MOST` times its share. More is not possible, because the ranks of
a node exchange parts of equal size, and the gradient inside a node is much larger than the factors between nodes.

A rank owns at most one piece of a parameter, so that state is found by the parameter's name. The bucket's first name decides
which rank owns the largest part, so that the largest parts of all buckets do not have the same owner.
"""

import itertools
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from ch_core import SIZES, contiguous_stride
from commhooks import Bucket, BucketLayout, ParamLayout

# Measured in docs/measured/two-level.md, "Limits of the partition".
TOLERATED = 1.25  # largest load of a rank over the mean load
EXTRA = 1.5  # largest size of the factors of a bucket with cuts over their size without
MOST = 2.0  # largest load of a rank over the mean load if cuts would exceed EXTRA


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements ``start`` to ``stop`` of a parameter in the order of its memory."""

    param: ParamLayout
    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start

    def layout(self, offset: int) -> ParamLayout:
        """Return the piece as a separate parameter at ``offset``. It keeps the name, and is a matrix if the parameter
        is.

        A parameter in another order than row by row becomes a matrix in the order of its memory. Then an entry of state in the
        piece's own order lies in this order too, as :class:`~ch_core.reduction.Pieces` expects.
        """
        p, numel = self.param, self.numel
        inner = p.matrix_shape[1]
        if p.stride != contiguous_stride(p.shape) and self.start % inner == self.stop % inner == 0:
            return ParamLayout(p.name, (numel // inner, inner), (inner, 1), offset)
        if numel == p.numel:
            return replace(p, offset=offset)
        if len(p.shape) < 2:
            return ParamLayout(p.name, (numel,), (1,), offset)
        if self.start % inner or self.stop % inner:
            return ParamLayout(p.name, (1, numel), (numel, 1), offset)
        axis = max(range(len(p.shape)), key=lambda axis: (p.stride[axis], -axis))  # as in matrix_shape
        shape = list(p.shape)
        shape[axis] = numel // inner
        return ParamLayout(p.name, tuple(shape), p.stride, offset)


class Partition:
    """Parts of equal size, one for each rank of a node. It follows from layout, number of ranks and kind alone.

    Args:
        layout: of the bucket.
        owned: pieces of each rank.

    Attributes:
        owned: the argument.
        numel: elements of one part, with padding.
        layouts: layout of each rank's part, as a bucket of its pieces.

    Example:
        >>> made = partition(BucketLayout.of_shapes({"w": (8, 4), "b": (32,)}), 2, "rows")
        >>> [[(piece.param.name, piece.start, piece.stop) for piece in part] for part in made.owned]
        [[('w', 0, 32)], [('b', 0, 32)]]
        >>> packed = made.pack(Bucket(BucketLayout.of_shapes({"w": (8, 4), "b": (32,)}), torch.arange(64.0)), torch.empty(64))
        >>> packed.view(2, 32)[1, :3]
        tensor([32., 33., 34.])
    """

    def __init__(self, layout: BucketLayout, owned: Sequence[Sequence[Piece]]) -> None:
        self.owned = tuple(tuple(part) for part in owned)
        largest = max(sum(piece.numel for piece in part) for part in self.owned)
        self.numel = max(_aligned(largest, len(self.owned)), 1)
        dtype = torch.float64 if layout.dtype == torch.float64 else torch.float32
        made, runs = [], []
        for place, part in enumerate(self.owned):
            offset, params = 0, []
            for piece in part:
                params.append(piece.layout(offset))
                runs.append((piece.param.offset + piece.start, place * self.numel + offset, piece.numel))
                offset += piece.numel
            made.append(BucketLayout(params, self.numel, dtype, layout.device))
        self.layouts = tuple(made)
        self._runs = _merged(runs)
        total = self.numel * len(self.owned)
        self._gaps = _gaps(self._runs, total)
        self._in_place = self._runs == [(0, 0, total)] and layout.numel == total

    def pack(self, bucket: Bucket, room: torch.Tensor) -> torch.Tensor:
        """Return the parts one after another: the bucket's own storage, or ``room``, filled from it."""
        if self._in_place:
            return bucket.storage
        for source, target, numel in self._runs:
            room[target : target + numel].copy_(bucket.storage[source : source + numel])
        for start, stop in self._gaps:
            room[start:stop].zero_()
        return room

    def unpack(self, packed: torch.Tensor, bucket: Bucket) -> None:
        """Copy the parts back to the bucket."""
        for source, target, numel in self._runs:
            bucket.storage[source : source + numel].copy_(packed[target : target + numel])


def partition(layout: BucketLayout, ranks: int, splits: str) -> Partition:
    """Return the partition of a bucket among the ranks of a node.

    Args:
        layout: of the bucket, dense parameters only.
        ranks: of the node.
        splits: ``"elements"`` or ``"rows"``, see :attr:`.Reduction.splits`.
    """
    params = sorted((p for p in layout.params if p.numel), key=lambda p: p.offset)
    owned = _by_elements(params, ranks) if splits == "elements" else _by_rows(params, ranks)
    return Partition(layout, owned)


def _aligned(numel: int, ranks: int) -> int:
    """Return the size of a part, rounded up to a whole cache line unless that would leave a rank with little or nothing."""
    line = SIZES.aligned_elements
    return -(-numel // line) * line if numel > line * ranks else numel


def _by_elements(params: Sequence[ParamLayout], ranks: int) -> list[list[Piece]]:
    total = sum(p.numel for p in params)
    share = _aligned(-(-total // ranks), ranks)
    owned: list[list[Piece]] = [[] for _ in range(ranks)]
    at = 0
    for p in params:
        start = 0
        while start < p.numel:
            place = min((at + start) // share, ranks - 1)
            stop = min(p.numel, (place + 1) * share - at)
            owned[place].append(Piece(p, start, stop))
            start = stop
        at += p.numel
    return owned


def _by_rows(params: Sequence[ParamLayout], ranks: int) -> list[list[Piece]]:
    cuts = {p.name: 1 for p in params}
    mean = sum(p.numel for p in params) / ranks
    factors = sum(sum(p.matrix_shape) for p in params)
    room = (EXTRA - 1) * factors  # for more right factors
    while True:
        owned = _assigned([piece for p in params for piece in _rows(p, cuts[p.name])], ranks)
        fullest = max(owned, key=lambda part: sum(piece.numel for piece in part))
        load = sum(piece.numel for piece in fullest) / mean if mean else 0.0
        able = [piece for piece in fullest if cuts[piece.param.name] < min(ranks, piece.param.matrix_shape[0])]
        cheap = [piece for piece in able if piece.param.matrix_shape[1] <= room]
        if load <= (TOLERATED if cheap else MOST) or not able:
            break
        cut = max(cheap or able, key=lambda piece: (piece.numel, -piece.param.offset)).param
        cuts[cut.name] += 1
        room -= cut.matrix_shape[1]
    turned = zlib.crc32(params[0].name.encode()) % ranks if params else 0
    owned = owned[-turned:] + owned[:-turned]
    return [sorted(part, key=lambda piece: (piece.param.offset, piece.start)) for part in owned]


def _rows(p: ParamLayout, count: int) -> list[Piece]:
    """Return a parameter in ``count`` runs of rows, as equal as possible."""
    rows, cols = p.matrix_shape
    bounds = [rows * i // count * cols for i in range(count + 1)]
    return [Piece(p, a, b) for a, b in itertools.pairwise(bounds)]


def _assigned(pieces: Sequence[Piece], ranks: int) -> list[list[Piece]]:
    """Give the largest pieces first, each to the rank with the least elements that has no piece of the parameter."""
    owned: list[list[Piece]] = [[] for _ in range(ranks)]
    loads, names = [0] * ranks, [set[str]() for _ in range(ranks)]
    for piece in sorted(pieces, key=lambda piece: (-piece.numel, piece.param.offset, piece.start)):
        place = min((load, i) for i, load in enumerate(loads) if piece.param.name not in names[i])[1]
        owned[place].append(piece)
        names[place].add(piece.param.name)
        loads[place] += piece.numel
    return owned


def _merged(runs: Iterable[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Join runs ``(source, target, numel)`` that follow each other in both places."""
    made: list[tuple[int, int, int]] = []
    for source, target, numel in runs:
        if made and made[-1][0] + made[-1][2] == source and made[-1][1] + made[-1][2] == target:
            made[-1] = (made[-1][0], made[-1][1], made[-1][2] + numel)
        else:
            made.append((source, target, numel))
    return made


def _gaps(runs: Sequence[tuple[int, int, int]], total: int) -> list[tuple[int, int]]:
    """Return the elements of the parts that no run fills."""
    made, at = [], 0
    for _, target, numel in sorted(runs, key=lambda run: run[1]):
        if target > at:
            made.append((at, target))
        at = target + numel
    if at < total:
        made.append((at, total))
    return made
