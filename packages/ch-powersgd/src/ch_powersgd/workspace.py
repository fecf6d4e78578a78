"""What PowerSGD works on in one bucket: its matrices, the factors P and Q of each, and every view of them.

Factors are stored as rows: the P of a ``rows x cols`` matrix is ``(rank, rows)``, its Q ``(rank, cols)``. Skinny
products are two to three times faster that way round, and a factor's columns are contiguous. All P's of a bucket lie
in one flat tensor (all Q's in another), sorted so that factors of one size are neighbours.

A matrix that is one parameter in the bucket is worked on where it lies and, on a CPU, in blocks of rows that stay in a
core's cache from one pass to the next. Others, and those narrower than fp32, are built in scratch.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby

import torch

from ch_powersgd.orthonormal import Columns, gaussians
from commhooks import Bucket, BucketLayout, ParamLayout

Blocks = list[tuple[torch.Tensor, torch.Tensor]]
Product = Callable[..., torch.Tensor]

_BLOCK = 1 << 16  # elements of a matrix that are added, multiplied and decoded at once on a CPU
_SMALL = 1 << 20  # elements of a matrix whose passes over memory take no longer than launching a kernel


@dataclass(frozen=True)
class Stack:
    """``count`` matrices ``(rows, cols)`` that are multiplied at once, and the parameters that fill them.

    The gradients of ``params`` lie one after another in the stack's ``count * rows * cols`` elements; what they leave
    is padding, and zero.

    Attributes:
        keys: one state key per matrix, for its Q.
        rank: columns of P and Q.
    """

    keys: tuple[str, ...]
    params: tuple[ParamLayout, ...]
    rows: int
    cols: int
    rank: int

    @property
    def numel(self) -> int:
        """Elements, padding included."""
        return len(self.keys) * self.rows * self.cols

    @property
    def direct(self) -> bool:
        """Whether one parameter, as it lies in the bucket, is the whole stack."""
        return len(self.params) == 1 and self.params[0].matrix_shape == (self.rows, self.cols)


def stacked(params: Sequence[ParamLayout], rank: int, device: torch.device) -> list[Stack]:
    """One stack per parameter; small matrices of one shape together where launching kernels is what costs.

    On a CPU nothing is launched, and gathering the matrices would be one more pass over memory.
    """
    together: dict[object, list[ParamLayout]] = {}
    for p in params:
        together.setdefault(p.matrix_shape if batches(device) and p.numel < _SMALL else p.name, []).append(p)
    return [_stack(tuple(p.name for p in same), same, *same[0].matrix_shape, rank) for same in together.values()]


def batches(device: torch.device) -> bool:
    """Whether a kernel's launch costs more there than gathering a small matrix."""
    return device.type != "cpu"


def square(params: Sequence[ParamLayout], numel: int, rank: int) -> list[Stack]:
    """All parameters, one after another, as one near-square matrix."""
    cols = math.isqrt(numel - 1) + 1
    return [_stack((params[0].name,), params, -(-numel // cols), cols, rank)]


def _stack(keys: tuple[str, ...], params: Sequence[ParamLayout], rows: int, cols: int, rank: int) -> Stack:
    return Stack(keys, tuple(params), rows, cols, min(rows, cols, rank))


class Factor:
    """Where the P (or Q) of each stack lies in one flat tensor.

    Args:
        sizes: per stack ``(count, rank, length)``.

    Example:
        >>> f = Factor([(1, 2, 5), (1, 2, 3), (2, 2, 5)])
        >>> f.numel
        36
        >>> [tuple(v.shape) for v in f.views(torch.zeros(36))]
        [(1, 2, 5), (1, 2, 3), (2, 2, 5)]
    """

    def __init__(self, sizes: Sequence[tuple[int, int, int]]) -> None:
        order = sorted(range(len(sizes)), key=lambda i: sizes[i][1:])
        self._sizes = [sizes[i] for i in order]
        self._lengths = [math.prod(size) for size in self._sizes]
        self._position = {stack: position for position, stack in enumerate(order)}
        self.numel = sum(self._lengths)

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Per stack, in the order given: ``(count, rank, length)``."""
        parts = torch.split_with_sizes(flat, self._lengths)
        return [parts[self._position[i]].view(self._sizes[self._position[i]]) for i in range(len(parts))]

    def by_rank(self, flat: torch.Tensor) -> list[list[torch.Tensor]]:
        """Neighbours of one size as one batch ``(matrices, rank, length)``, those of one rank together."""
        sizes = [
            (sum(size[0] for size in same), *shape) for shape, same in groupby(self._sizes, key=lambda size: size[1:])
        ]
        parts = torch.split_with_sizes(flat, [math.prod(size) for size in sizes])
        batches = [part.view(size) for part, size in zip(parts, sizes, strict=True)]
        return [list(same) for _, same in groupby(batches, key=lambda batch: batch.shape[1])]


class Factors:
    """P, Q and the Q that this rank sent, of all matrices of a bucket, cut up.

    Attributes:
        of: the flat tensors that are cut up: all P's, all Q's, and the Q's as sent.
        stacks: P, Q and sent Q of each stack, ``(count, rank, length)``.
        matrices_q: of every matrix its key, its stack and its Q ``(rank, cols)``.
        p_columns, q_columns: to be made orthonormal, by rank.
    """

    def __init__(self, space: "Workspace", p: torch.Tensor, q: torch.Tensor, sent: torch.Tensor) -> None:
        self.of = (p, q, sent)
        self.stacks = list(zip(space.p.views(p), space.q.views(q), space.q.views(sent), strict=True))
        self.p_columns = [Columns(same) for same in space.p.by_rank(p)]
        self.q_columns = [Columns(same) for same in space.q.by_rank(q)]
        self.matrices_q = [
            (key, stack, one)
            for stack, (_, part, _) in zip(space.stacks, self.stacks, strict=True)
            for key, one in zip(stack.keys, part.unbind(0), strict=True)
        ]


class Matrix:
    """A stack where it is worked on: in the bucket, without the leading ``count``, or in scratch as one block.

    Attributes:
        d: ``(rows, cols)``, or ``(count, rows, cols)``; so with all that follows.
        p, q, sent: ``(rank, rows)``, and twice ``(rank, cols)``.
        right: Q as columns, ``(cols, rank)``.
        blocks: the rows of ``d`` ``(n, cols)``, with the part of P that they give, as columns ``(n, rank)``.
        product, outer_product, less_product: ``a b``; ``a b`` over a length of ``rank``; ``d - a b``.
    """

    __slots__ = (
        "_residuals", "blocks", "d", "in_place", "less_product", "outer_product", "p", "product", "q", "right", "sent",
        "stack",
    )  # fmt: skip

    def __init__(
        self, stack: Stack, d: torch.Tensor, p: torch.Tensor, q: torch.Tensor, sent: torch.Tensor, blocks: Blocks
    ) -> None:
        self.stack, self.d, self.p, self.q, self.sent, self.right, self.blocks = stack, d, p, q, sent, q.mT, blocks
        self.in_place = d.dim() == 2
        self.product: Product = torch.mm if self.in_place else torch.bmm
        by_vectors = self.in_place and stack.rank == 1  # elementwise is faster than a product over a length of one
        self.outer_product: Product = torch.mul if by_vectors else self.product
        subtract = torch.addmm if self.in_place else torch.baddbmm
        self.less_product: Product = partial(torch.addcmul, value=-1) if by_vectors else partial(subtract, alpha=-1)
        self._residuals: list[tuple[torch.Tensor, Sequence[torch.Tensor]]] = []

    def rows_of(self, residual: torch.Tensor) -> Sequence[torch.Tensor]:
        """A residual ``(rows, cols)``, in blocks. The committed and the staged one take turns: each is cut up once."""
        for tensor, rows in self._residuals:
            if tensor is residual:
                return rows
        rows = residual.split_with_sizes([len(d) for d, _ in self.blocks])
        self._residuals = [*self._residuals[-1:], (residual, rows)]
        return rows


class Workspace:
    """The buckets of one layout: stacks, factors and views.

    Attributes:
        dtype: of algebra and state: fp32, or fp64 for fp64 gradients.
        p, q: where the factors of each stack lie.
        largest: elements of the largest stack.
    """

    def __init__(self, stacks: list[Stack], layout: BucketLayout) -> None:
        self.stacks, self._device = stacks, layout.device
        self.dtype = torch.promote_types(layout.dtype, torch.float32)
        self.p = Factor([(len(s.keys), s.rank, s.rows) for s in stacks])
        self.q = Factor([(len(s.keys), s.rank, s.cols) for s in stacks])
        self.largest = max(s.numel for s in stacks)
        self._in_place = [layout.dtype == self.dtype and s.direct for s in stacks]
        self._noise: list[list[torch.Tensor]] = []
        self._factors: Factors | None = None

    def factors(self, p: torch.Tensor, q: torch.Tensor, sent: torch.Tensor) -> Factors:
        """The views of these flat tensors, which are the same at every step: made once."""
        if self._factors is None or not all(a is b for a, b in zip(self._factors.of, (p, q, sent), strict=True)):
            self._factors = Factors(self, p, q, sent)
        return self._factors

    def in_place(self, bucket: Bucket, factors: Factors) -> dict[int, Matrix]:
        """Number of the stack -> matrix, of those that are worked on in the bucket; kept as long as the bucket is."""

        def make() -> dict[int, Matrix]:
            return {i: self._view(i, bucket, factors) for i, here in enumerate(self._in_place) if here}

        return bucket.cached(self, make, factors)

    def noise(self, seed: int) -> list[list[torch.Tensor]]:
        """Columns for where Q has none, as :attr:`Factors.q_columns`: the same at every step, so made once."""
        if not self._noise:
            flat = torch.empty(self.q.numel, dtype=self.dtype, device=self._device)
            targets = [t for view in self.q.views(flat) for t in view.unbind(0)]
            wanted = [(key, (stack.rank, stack.cols)) for stack in self.stacks for key in stack.keys]
            torch._foreach_copy_(targets, gaussians(seed, wanted, -1, self._device))
            self._noise = self.q.by_rank(flat)
        return self._noise

    def _view(self, number: int, bucket: Bucket, factors: Factors) -> Matrix:
        stack, d = self.stacks[number], bucket.matrix(self.stacks[number].params[0])
        p, q, sent = (factor[0] for factor in factors.stacks[number])
        lengths = block_rows(stack, on_cpu=self._device.type == "cpu")
        blocks = zip(d.split_with_sizes(lengths), p.t().split_with_sizes(lengths), strict=True)
        return Matrix(stack, d, p, q, sent, list(blocks))


def block_rows(stack: Stack, *, on_cpu: bool) -> list[int]:
    """Rows of each block of a matrix, as even as can be; one block where there is no cache to stay in."""
    block = 2 * _BLOCK if stack.rank == 1 else _BLOCK  # vectors are multiplied faster: fewer calls
    wanted = round(stack.rows * stack.cols / block) if on_cpu else 1
    n = -(-stack.rows // min(max(wanted, 1), stack.rows))
    return [min(n, stack.rows - start) for start in range(0, stack.rows, n)]
