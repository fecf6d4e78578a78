"""Memory of PowerSGD for one bucket: the matrices, their factors P and Q, and all views of them.

Factors are stored as rows: P of a ``rows x cols`` matrix is ``(rank, rows)``, Q is ``(rank, cols)``. Skinny products run
two to three times faster in this layout, and each column of a factor is contiguous.

A matrix that is one fp32 or fp64 parameter is processed in the bucket itself. On a CPU its rows are split into blocks
that stay in a core's cache between two passes. All other matrices are copied to scratch memory.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import groupby

import torch

from ch_core import cut, seeded_normals
from ch_powersgd.orthonormal import Columns
from ch_powersgd.sizes import SIZES
from commhooks import Bucket, ParamLayout

Make = Callable[..., torch.Tensor]


def prefers_batches(device: torch.device, numel: int) -> bool:
    """Return True if a kernel launch costs more than a copy of ``numel`` elements into a batch."""
    return device.type != "cpu" and numel < SIZES.batched_below


def load_into_cache(block: torch.Tensor) -> None:
    """Read a block once, at the speed of memory, so that it lies in a core's cache.

    A skinny product of an uncached block waits for every cache line. Without this line it takes up to 1.5 times longer.
    """
    if block.device.type == "cpu" and block.numel() >= SIZES.loaded_from:
        block.sum()


@dataclass(frozen=True)
class Stack:
    """``count`` matrices ``(rows, cols)`` that share one batched product, with P and Q of ``rank`` columns.

    The gradients of ``params`` lie one after another in the stack. Zeros pad its end.
    """

    params: tuple[ParamLayout, ...]
    count: int
    rows: int
    cols: int
    rank: int

    @property
    def numel(self) -> int:
        """Number of elements, with padding."""
        return self.count * self.rows * self.cols

    @property
    def is_one_param(self) -> bool:
        """True if the stack is exactly one parameter in its own shape."""
        return len(self.params) == 1 and self.params[0].matrix_shape == (self.rows, self.cols)

    def pieces(self, memory: torch.Tensor) -> Iterator[tuple[ParamLayout, torch.Tensor]]:
        """Yield each parameter with its view ``(rows, cols)`` of the stack's memory."""
        return zip(self.params, cut(memory.view(-1), [p.matrix_shape for p in self.params]), strict=True)

    def block_rows(self, device: torch.device) -> list[int]:
        """Return the number of rows of each block, as even as possible. Other devices than CPUs use one block."""
        block = SIZES.block_elements
        if self.rank == 1:  # matrix-vector products are faster: fewer calls
            block = block * 3 // 2
        wanted = round(self.rows * self.cols / block) if device.type == "cpu" else 1
        n = -(-self.rows // min(max(wanted, 1), self.rows))
        return [min(n, self.rows - start) for start in range(0, self.rows, n)]


class Factor:
    """P (or Q) of all stacks in one flat tensor, sorted so that equal sizes are neighbours.

    Args:
        flat: the memory, ``(sum of sizes,)``.
        sizes: ``(count, rank, length)`` of each stack.

    Attributes:
        stacks: one view ``(count, rank, length)`` per stack.
        matrices: one view ``(rank, length)`` per matrix, in the order of the stacks.
        by_rank: for each rank, its batches ``(matrices, rank, length)`` of equal length.
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

    def orthonormalise(self, replacements: "Factor | None" = None, epsilon: float = 0.0) -> None:
        """Apply :meth:`Columns.orthonormalise` to every matrix. ``replacements`` has the same sizes."""
        for i, columns in enumerate(self._columns):
            columns.orthonormalise(replacements.by_rank[i] if replacements is not None else None, epsilon)


class Matrix:
    """A stack with its memory, in the bucket or in scratch.

    Attributes:
        in_place: True if ``d`` is memory of the bucket.
        d: ``(rows, cols)``, or ``(count, rows, cols)`` for several matrices, as all shapes below.
        p, q, own_q: ``(rank, rows)``, ``(rank, cols)``, ``(rank, cols)``.
        q_columns: Q as columns, ``(cols, rank)``.
        blocks: pairs of rows of ``d`` ``(n, cols)`` and the rows of P that belong to them ``(n, rank)``.
        product: ``a b``.
        outer_product: ``a b`` with an inner length of ``rank``.
        less_product: ``d - a b``.
    """

    def __init__(
        self, stack: Stack, d: torch.Tensor, factors: Sequence[Factor], number: int, in_place: bool = False
    ) -> None:
        self.stack, self.d, self.in_place = stack, d, in_place
        one = d.dim() == 2
        self._block_rows = stack.block_rows(d.device) if one else [stack.rows]
        self.p, self.q, self.own_q = (f.stacks[number][0] if one else f.stacks[number] for f in factors)
        self.q_columns = self.q.mT
        self.product: Make = torch.mm if one else torch.bmm
        by_vectors = one and stack.rank == 1  # elementwise beats a product with an inner length of one
        self.outer_product: Make = torch.mul if by_vectors else self.product
        subtract = torch.addmm if one else torch.baddbmm
        self.less_product: Make = partial(torch.addcmul, value=-1) if by_vectors else partial(subtract, alpha=-1)
        self._split = [(d, self._split_rows(d))]
        self.blocks = list(zip(self._split_rows(d), self._split_rows(self.p.mT), strict=True))

    def project_back(self) -> None:
        """Compute ``q = p d``, summed over the blocks."""
        for number, (d, p) in enumerate(self.blocks):
            load_into_cache(d)
            if number == 0:
                self.product(p.mT, d, out=self.q)  # (rank, n) (n, cols)
            else:
                self.q.addmm_(p.mT, d)

    def rows_of(self, whole: torch.Tensor | None) -> Sequence[torch.Tensor | None]:
        """Return ``d`` or a residual in blocks of rows.

        The committed and the new residual alternate between steps. The matrix remembers the views of both.
        """
        if whole is None or len(self.blocks) == 1:
            return [whole] * len(self.blocks)
        for tensor, rows in self._split:
            if tensor is whole:
                return rows
        self._split = [self._split[0], *self._split[1:][-1:], (whole, self._split_rows(whole))]
        return self._split[-1][1]

    def _split_rows(self, whole: torch.Tensor) -> Sequence[torch.Tensor]:
        return whole.split_with_sizes(self._block_rows) if len(self._block_rows) > 1 else [whole]


class Workspace:
    """Stacks of one bucket layout, with everything that stays the same from step to step.

    Attributes:
        dtype: dtype of algebra and state, fp32 (fp64 for fp64 gradients).
        q_shapes: ``(rank, cols)`` of each matrix's Q, by the parameter name that state uses for it.
        largest: number of elements of the largest stack.
    """

    def __init__(self, stacks: list[Stack], dtype: torch.dtype, device: torch.device) -> None:
        self.stacks, self.device = stacks, device
        self.dtype = torch.promote_types(dtype, torch.float32)
        self.q_shapes = {p.name: (stack.rank, stack.cols) for stack in stacks for p in stack.params[: stack.count]}
        self.largest = max(s.numel for s in stacks)
        self._in_place = {i: s for i, s in enumerate(stacks) if s.is_one_param and dtype == self.dtype}
        p, q = [(s.count, s.rank, s.rows) for s in stacks], [(s.count, s.rank, s.cols) for s in stacks]
        self._sizes = {name: (sum(map(math.prod, s)), s) for name, s in (("p", p), ("q", q), ("own q", q))}
        self._factors: tuple[Factor, ...] = ()
        self._random_columns: Factor | None = None

    def factors(self, scratch: Make) -> tuple[Factor, ...]:
        """Return P, Q and this rank's Q_i. Scratch memory is the same at every step, so views are made once."""
        flats = [scratch(name, (numel,)) for name, (numel, _) in self._sizes.items()]
        if [id(factor.flat) for factor in self._factors] != [id(flat) for flat in flats]:
            sizes = (s for _, s in self._sizes.values())
            self._factors = tuple(map(Factor, flats, sizes))
        return self._factors

    def in_place(self, bucket: Bucket, factors: tuple[Factor, ...]) -> dict[int, Matrix]:
        """Return the matrices that are processed in the bucket, by stack number. The bucket caches them."""

        def matrices() -> dict[int, Matrix]:
            return {
                i: Matrix(s, bucket.matrix(s.params[0]), factors, i, in_place=True) for i, s in self._in_place.items()
            }

        return bucket.cached(self, matrices, factors)

    def random_columns(self, seed: int) -> Factor:
        """Return random unit columns of Q's sizes, for columns that Q has lost."""
        if self._random_columns is None:
            numel, sizes = self._sizes["q"]
            self._random_columns = Factor(torch.empty(numel, dtype=self.dtype, device=self.device), sizes)
            drawn = seeded_normals(f"{seed}/-1", self.q_shapes, self.device, unit=True)
            torch._foreach_copy_(self._random_columns.matrices, [*drawn.values()])
        return self._random_columns
