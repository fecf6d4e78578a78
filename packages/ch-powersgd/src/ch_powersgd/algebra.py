"""The linear algebra of PowerSGD: where P and Q lie, and how their columns are made orthonormal.

Factors are stored as rows: the P of a ``rows x cols`` matrix is ``(rank, rows)``, its Q ``(rank, cols)``. Skinny
products are two to three times faster that way round, and a factor's columns are contiguous. All P's of a bucket lie
in one flat tensor (all Q's in another), sorted so that factors of one size are neighbours and are treated as one
batch.

Orthonormalising is Cholesky-QR, twice: X <- L^-1 X with L L^T = X X^T, whose precision does not depend on how long each
column is. All of it is done in fp64, because squaring squares the condition number. Nothing branches on numbers: a
column that depends on the ones before it, to the precision of fp32, is zeroed or replaced, and NaN stays NaN.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

import torch

from commhooks.bucket import ParamLayout

# Of a column of length one, in units of squared length: what fp64 rounding may leave of a dependent column, and the
# part below which an fp32 column holds nothing but rounding (four parts in a million of its length).
_SHIFT = 1e-13
_DEPENDENT = 1.6e-11
# Lengths below 1e-30 count as zero, so that what they are multiplied with stays within fp32.
_NOTHING = 1e-60


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

    @cached_property
    def count(self) -> int:
        """Matrices in the stack."""
        return len(self.keys)

    @cached_property
    def numel(self) -> int:
        """Elements, padding included."""
        return self.count * self.rows * self.cols

    @cached_property
    def filled(self) -> int:
        """Elements that parameters fill; the others are padding."""
        return sum(p.numel for p in self.params)

    @cached_property
    def direct(self) -> bool:
        """Whether one parameter, as it lies in the bucket, is the whole stack, so that nothing has to be gathered."""
        return len(self.params) == 1 and self.params[0].matrix_shape == (self.rows, self.cols)


class Factor:
    """Where the P (or Q) of each stack lies in one flat tensor.

    Args:
        sizes: per stack ``(count, rank, length)``.

    Example:
        >>> f = Factor([(1, 2, 5), (1, 2, 3), (2, 2, 5)])
        >>> f.numel
        36
        >>> import torch
        >>> [tuple(v.shape) for v in f.views(torch.zeros(36))]
        [(1, 2, 5), (1, 2, 3), (2, 2, 5)]
        >>> [tuple(v.shape) for v in f.runs(torch.zeros(36))]  # equal sizes side by side
        [(1, 2, 3), (3, 2, 5)]
    """

    def __init__(self, sizes: Sequence[tuple[int, int, int]]) -> None:
        self._order = sorted(range(len(sizes)), key=lambda i: sizes[i][1:])
        self._sizes = [sizes[i] for i in self._order]
        self._lengths = [math.prod(size) for size in self._sizes]
        self._place = {stack: place for place, stack in enumerate(self._order)}
        self._runs = [
            (sum(size[0] for size in same), *shape) for shape, same in groupby(self._sizes, key=lambda size: size[1:])
        ]
        self.numel = sum(self._lengths)

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Per stack, in the order given: ``(count, rank, length)``."""
        parts = torch.split_with_sizes(flat, self._lengths)
        return [parts[self._place[i]].view(self._sizes[self._place[i]]) for i in range(len(parts))]

    def runs(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Neighbours of one size as one batch: ``(matrices, rank, length)``, in ascending rank."""
        parts = torch.split_with_sizes(flat, [math.prod(run) for run in self._runs])
        return [part.view(run) for part, run in zip(parts, self._runs, strict=True)]

    def by_rank(self, flat: torch.Tensor) -> list[list[torch.Tensor]]:
        """:meth:`runs`, those of one rank together."""
        return [list(same) for _, same in groupby(self.runs(flat), key=lambda run: run.shape[1])]

    def columns(self, flat: torch.Tensor) -> list["Columns"]:
        """The columns of all factors in ``flat``, those of one rank together, to be made orthonormal in place."""
        return [Columns(same) for same in self.by_rank(flat)]


class Columns:
    """The columns of many factors of one rank, and what it takes to make them orthonormal for the same span.

    Args:
        parts: batches ``(matrices, rank, length)``, the columns being the rows of the last two dimensions; fp32 or
            fp64. They are changed in place.

    Example:
        >>> x = torch.tensor([[[3.0, 0.0, 4.0], [0.0, 2.0, 0.0], [3.0, 2.0, 4.0]]])  # the third is the sum
        >>> Columns([x]).orthonormalise()
        >>> (x @ x.mT).round(decimals=4)[0]
        tensor([[1., 0., 0.],
                [0., 1., 0.],
                [0., 0., 0.]])
    """

    def __init__(self, parts: list[torch.Tensor]) -> None:
        self.parts = parts
        self.rank = rank = parts[0].shape[1]
        self._counts = [part.shape[0] for part in parts]
        self._wide, self._spare = (_with_transposed(parts) for _ in range(2))
        count, device = sum(self._counts), parts[0].device
        self._gram = torch.empty((count, rank, rank), dtype=torch.float64, device=device)  # products of all columns
        self._grams = torch.split_with_sizes(self._gram, self._counts)
        self._squares = self._gram.diagonal(dim1=-2, dim2=-1)  # (matrices, rank)
        self._eye = torch.eye(rank, dtype=torch.float64, device=device).expand_as(self._gram)
        self._gap = self._gram.new_empty((count, rank, 1))
        self._gaps = torch.split_with_sizes(self._gap, self._counts)

    def orthonormalise(self, noise: list[torch.Tensor] | None = None, epsilon: float = 0.0) -> None:
        """Make the columns orthonormal, in place.

        Args:
            noise: as ``parts``, columns of length one that take the place of dependent ones. Without it those
                become zero.
            epsilon: added to each column's length before it divides: columns much shorter than this are damped.
        """
        torch._foreach_copy_([wide for wide, _ in self._wide], self.parts)
        self._multiply()
        whiten, length, dependent = self._whiten()
        whiten.masked_fill_(dependent, 0.0)
        self._apply(whiten)
        if noise is not None:
            self._gap.copy_(dependent)
            torch._foreach_addcmul_([wide for wide, _ in self._wide], self._gaps, noise)
        if self.rank > 1:
            self._multiply()
            self._squares.add_(_SHIFT)
            self._apply(self._inverse_root()[0])
        wide = [wide for wide, _ in self._wide]
        if epsilon:
            torch._foreach_mul_(wide, torch.split_with_sizes(length / (length + epsilon), self._counts))
        torch._foreach_copy_(self.parts, wide)

    def _multiply(self) -> None:
        """All columns of a matrix with each other."""
        for (wide, transposed), gram in zip(self._wide, self._grams, strict=True):
            torch.bmm(wide, transposed, out=gram)

    def _whiten(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """``(T, length, dependent)``: ``T X`` has orthonormal columns.

        ``length`` ``(matrices, rank, 1)`` is what is left of a column after subtracting its projection on those before
        it, ``dependent`` whether that is nothing but rounding.
        """
        if self.rank == 1:
            length = self._gram.sqrt()
            inverse = self._gram * self._gram.clamp_min(_NOTHING).rsqrt().pow(3)  # not 1 / length: of Inf it is NaN
            return inverse, length, self._gram <= _NOTHING
        squares = self._squares.mul_(1 + _SHIFT * self.rank).clamp_min_(2 * _NOTHING)
        whiten, length = self._inverse_root()
        nothing, rounding = squares <= 2 * _NOTHING, squares * (_DEPENDENT * self.rank)
        return whiten, length, (length.square() <= rounding.unsqueeze(-1)) | nothing.unsqueeze(-1)

    def _inverse_root(self) -> tuple[torch.Tensor, torch.Tensor]:
        """``L^-1`` of ``L L^T = X X^T``, and the diagonal of ``L``. How long a column is makes no difference to the
        precision of either.
        """
        lower, _ = torch.linalg.cholesky_ex(self._gram)
        inverse = torch.linalg.solve_triangular(lower, self._eye, upper=False)
        return inverse, lower.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)

    def _apply(self, left: torch.Tensor) -> None:
        parts = torch.split_with_sizes(left, self._counts)
        for part, (wide, _), (out, _) in zip(parts, self._wide, self._spare, strict=True):
            if self.rank == 1:
                torch.mul(part, wide, out=out)
            else:
                torch.bmm(part, wide, out=out)
        self._wide, self._spare = self._spare, self._wide


def _with_transposed(parts: list[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    wide = [torch.empty_like(part, dtype=torch.float64) for part in parts]
    return [(part, part.mT) for part in wide]


def gaussian(seed: int, key: str, step: int, shape: tuple[int, int], device: torch.device) -> torch.Tensor:
    """Random columns ``(rank, length)``, each of length one: the same on all ranks, whatever bucket they are in.

    >>> cpu = torch.device("cpu")
    >>> torch.equal(gaussian(0, "w", 0, (2, 3), cpu), gaussian(0, "w", 0, (2, 3), cpu))
    True
    """
    if device.type == "meta":
        return torch.empty(shape, device=device)
    digest = hashlib.blake2b(f"{seed}/{step}/{key}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    columns = torch.randn(shape, generator=generator)
    return torch.nn.functional.normalize(columns, dim=-1).to(device)
