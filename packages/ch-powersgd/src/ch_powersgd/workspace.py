"""What PowerSGD works on in one bucket: its matrices, the factors P and Q of each, and every view of them.

Factors are stored as rows: the P of a ``rows x cols`` matrix is ``(rank, rows)``, its Q ``(rank, cols)``. Skinny
products are two to three times faster that way round, and a factor's columns are contiguous.

A matrix that is one parameter in the bucket is worked on where it lies and, on a CPU, in blocks of rows that stay in a
core's cache from one pass to the next. Others, and those narrower than fp32, are built in scratch.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import groupby

import torch

from ch_powersgd.orthonormal import Columns
from commhooks import Bucket, ParamLayout
from commhooks.numerics import cut, seeded_normals

_BLOCK = 1 << 17  # elements of a matrix that are added, multiplied and decoded at once on a CPU: half of a core's cache
_LINES = 1 << 14  # elements of a block that may still be in the cache, or takes no time to be brought there
_SMALL = 1 << 20  # elements of a matrix whose passes over memory take no longer than launching a kernel

Make = Callable[..., torch.Tensor]


def batches(device: torch.device, numel: int) -> bool:
    """Whether launching a kernel costs more there than gathering a matrix of so many elements."""
    return device.type != "cpu" and numel < _SMALL


def to_cache(block: torch.Tensor) -> None:
    """Bring a block of a matrix into a core's cache, at the speed of memory: a skinny product of a block that is not there
    waits for every line of it, which can take half as long again as both (``ch_bench.cost.passes``).
    """
    if block.device.type == "cpu" and block.numel() >= _LINES:
        block.sum()


@dataclass(frozen=True)
class Stack:
    """``count`` matrices ``(rows, cols)`` that are multiplied at once, with P and Q of ``rank`` columns.

    The gradients of ``params`` lie one after another in the stack; what they leave is padding, and zero.
    """

    params: tuple[ParamLayout, ...]
    count: int
    rows: int
    cols: int
    rank: int

    @property
    def numel(self) -> int:
        """Elements, padding included."""
        return self.count * self.rows * self.cols

    @property
    def direct(self) -> bool:
        """Whether one parameter, as it lies in the bucket, is the whole stack."""
        return len(self.params) == 1 and self.params[0].matrix_shape == (self.rows, self.cols)

    def pieces(self, home: torch.Tensor) -> Iterator[tuple[ParamLayout, torch.Tensor]]:
        """The stack's elements by parameter, each in its own ``(rows, cols)``."""
        return zip(self.params, cut(home.view(-1), [p.matrix_shape for p in self.params]), strict=True)

    def block_rows(self, device: torch.device) -> list[int]:
        """Rows of each block of a matrix, as even as can be; one block where there is no cache to stay in."""
        block = _BLOCK * 3 // 2 if self.rank == 1 else _BLOCK  # vectors are multiplied faster: fewer calls
        wanted = round(self.rows * self.cols / block) if device.type == "cpu" else 1
        n = -(-self.rows // min(max(wanted, 1), self.rows))
        return [min(n, self.rows - start) for start in range(0, self.rows, n)]


class Factor:
    """The P (or Q) of each stack in one flat tensor, sorted so that those of one size are neighbours.

    Args:
        flat: what is cut up.
        sizes: per stack ``(count, rank, length)``.

    Attributes:
        stacks: one view per stack, of its size.
        matrices: each ``(rank, length)``, in the order of the stacks.
        by_rank: neighbours of one size as one batch ``(matrices, rank, length)``, those of one rank together.
    """

    def __init__(self, flat: torch.Tensor, sizes: Sequence[tuple[int, int, int]]) -> None:
        self.flat = flat
        order = sorted(range(len(sizes)), key=lambda i: sizes[i][1:])
        views = dict(zip(order, cut(flat, [sizes[i] for i in order]), strict=True))
        self.stacks = [views[i] for i in range(len(sizes))]
        neighbours = groupby((sizes[i] for i in order), key=lambda size: size[1:])
        batches = cut(flat, [(sum(size[0] for size in same), *shape) for shape, same in neighbours])
        self.by_rank = [list(same) for _, same in groupby(batches, key=lambda batch: batch.shape[1])]
        self.matrices = [one for stack in self.stacks for one in stack.unbind(0)]

    @cached_property
    def _columns(self) -> list[Columns]:
        return [Columns(same) for same in self.by_rank]

    def orthonormalise(self, noise: "Factor | None" = None, epsilon: float = 0.0) -> None:
        """:meth:`Columns.orthonormalise` of every matrix; ``noise`` is of the same sizes."""
        for i, columns in enumerate(self._columns):
            columns.orthonormalise(noise.by_rank[i] if noise is not None else None, epsilon)


class Matrix:
    """A stack where it is worked on: in the bucket or in scratch.

    Attributes:
        in_place: whether that is in the bucket.
        d: ``(rows, cols)``, or ``(count, rows, cols)`` of several; so with all that follows.
        p, q, sent: ``(rank, rows)``, and twice ``(rank, cols)``.
        right: Q as columns, ``(cols, rank)``.
        blocks: the rows of ``d`` ``(n, cols)``, with the part of P that they give, as columns ``(n, rank)``.
        product, outer_product, less_product: ``a b``; ``a b`` over a length of ``rank``; ``d - a b``.
    """

    def __init__(
        self, stack: Stack, d: torch.Tensor, factors: Sequence[Factor], number: int, in_place: bool = False
    ) -> None:
        self.stack, self.d, self.in_place = stack, d, in_place
        one = d.dim() == 2
        self._lengths = stack.block_rows(d.device) if one else [stack.rows]
        self.p, self.q, self.sent = (f.stacks[number][0] if one else f.stacks[number] for f in factors)
        self.right = self.q.mT
        self.product: Make = torch.mm if one else torch.bmm
        by_vectors = one and stack.rank == 1  # elementwise is faster than a product over a length of one
        self.outer_product: Make = torch.mul if by_vectors else self.product
        subtract = torch.addmm if one else torch.baddbmm
        self.less_product: Make = partial(torch.addcmul, value=-1) if by_vectors else partial(subtract, alpha=-1)
        self._cuts = [(d, self._cut(d))]
        self.blocks = list(zip(self._cut(d), self._cut(self.p.mT), strict=True))

    def project_back(self) -> None:
        """``q = p d``, from the blocks one after another."""
        for number, (d, left) in enumerate(self.blocks):
            to_cache(d)
            if number == 0:
                self.product(left.mT, d, out=self.q)  # (rank, n) (n, cols)
            else:
                self.q.addmm_(left.mT, d)

    def rows_of(self, whole: torch.Tensor | None) -> Sequence[torch.Tensor | None]:
        """``d`` or a residual, in blocks. The committed residual and the staged one take turns: each is cut up once."""
        if whole is None or len(self.blocks) == 1:
            return [whole] * len(self.blocks)
        for tensor, rows in self._cuts:
            if tensor is whole:
                return rows
        self._cuts = [self._cuts[0], *self._cuts[1:][-1:], (whole, self._cut(whole))]
        return self._cuts[-1][1]

    def _cut(self, whole: torch.Tensor) -> Sequence[torch.Tensor]:
        return whole.split_with_sizes(self._lengths) if len(self._lengths) > 1 else [whole]


class Workspace:
    """The buckets of one layout: stacks, and what is the same at every step and therefore made once.

    Attributes:
        dtype: of algebra and state: fp32, or fp64 for fp64 gradients.
        shapes: of every matrix's Q, ``(rank, cols)``, by the name that it is kept under.
        largest: elements of the largest stack.
    """

    def __init__(self, stacks: list[Stack], dtype: torch.dtype, device: torch.device) -> None:
        self.stacks, self.device = stacks, device
        self.dtype = torch.promote_types(dtype, torch.float32)
        self.shapes = {p.name: (stack.rank, stack.cols) for stack in stacks for p in stack.params[: stack.count]}
        self.largest = max(s.numel for s in stacks)
        self._direct = {i: s for i, s in enumerate(stacks) if s.direct and dtype == self.dtype}
        p, q = [(s.count, s.rank, s.rows) for s in stacks], [(s.count, s.rank, s.cols) for s in stacks]
        self._sizes = {name: (sum(map(math.prod, s)), s) for name, s in (("p", p), ("q", q), ("q sent", q))}
        self._factors: tuple[Factor, ...] = ()
        self._noise: Factor | None = None

    def factors(self, scratch: Make) -> tuple[Factor, ...]:
        """P, Q, and Q as this rank sent it, over scratch that is the same at every step."""
        flats = [scratch(name, (numel,)) for name, (numel, _) in self._sizes.items()]
        if [id(factor.flat) for factor in self._factors] != [id(flat) for flat in flats]:
            sizes = (s for _, s in self._sizes.values())
            self._factors = tuple(map(Factor, flats, sizes))
        return self._factors

    def in_place(self, bucket: Bucket, factors: tuple[Factor, ...]) -> dict[int, Matrix]:
        """Number of the stack -> matrix, of those that are worked on in the bucket; kept as long as the bucket is."""

        def matrices() -> dict[int, Matrix]:
            return {
                i: Matrix(s, bucket.matrix(s.params[0]), factors, i, in_place=True) for i, s in self._direct.items()
            }

        return bucket.cached(self, matrices, factors)

    def noise(self, seed: int) -> Factor:
        """Columns for where Q has none."""
        if self._noise is None:
            numel, sizes = self._sizes["q"]
            self._noise = Factor(torch.empty(numel, dtype=self.dtype, device=self.device), sizes)
            drawn = seeded_normals(f"{seed}/-1", self.shapes, self.device, unit=True)
            torch._foreach_copy_(self._noise.matrices, [*drawn.values()])
        return self._noise
