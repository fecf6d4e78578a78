"""The linear algebra of PowerSGD: where P and Q lie, and how their columns are made orthonormal.

Factors are stored as rows: the P of a ``rows x cols`` matrix is ``(rank, rows)``, its Q ``(rank, cols)``. Skinny
products are two to three times faster that way round, and a factor's columns are contiguous. All P's of a bucket lie
in one flat tensor (all Q's in another), sorted so that factors of one size are neighbours and are treated as one
batch.

Orthonormalising is Cholesky-QR, twice: X <- L^-1 X with L L^T = X X^T, the columns scaled to length one first. All of
it is done in fp64, because squaring squares the condition number. Nothing branches on numbers: a column that depends on
the ones before it, to the precision of fp32, is zeroed or replaced, and NaN stays NaN.
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
        self.rank = parts[0].shape[1]
        self._counts = [part.shape[0] for part in parts]
        self._wide, self._spare = ([torch.empty_like(part, dtype=torch.float64) for part in parts] for _ in range(2))

    def orthonormalise(self, noise: list[torch.Tensor] | None = None, epsilon: float = 0.0) -> None:
        """Make the columns orthonormal, in place.

        Args:
            noise: as ``parts``, columns of length one that take the place of dependent ones. Without it those
                become zero.
            epsilon: added to each column's length before it divides: columns much shorter than this are damped.
        """
        torch._foreach_copy_(self._wide, self.parts)
        whiten, length, dependent = _whitening(self._gram())
        whiten.masked_fill_(dependent.unsqueeze(-1), 0.0)
        self._apply(whiten)
        if noise is not None:
            gap = torch.split_with_sizes(dependent.unsqueeze(-1).double(), self._counts)
            for columns, where, fresh in zip(self._wide, gap, noise, strict=True):
                columns.addcmul_(where, fresh)
        if self.rank > 1:
            self._apply(_inverse_root(self._gram()))
        if epsilon:
            factor = torch.split_with_sizes((length / (length + epsilon)).unsqueeze(-1), self._counts)
            torch._foreach_mul_(self._wide, list(factor))
        torch._foreach_copy_(self.parts, self._wide)

    def _gram(self) -> torch.Tensor:
        """Products of all columns of a matrix with each other, ``(all matrices, rank, rank)``."""
        grams = [torch.bmm(wide, wide.mT) for wide in self._wide]
        return torch.cat(grams) if len(grams) > 1 else grams[0]

    def _apply(self, whiten: torch.Tensor) -> None:
        for t, wide, out in zip(torch.split_with_sizes(whiten, self._counts), self._wide, self._spare, strict=True):
            if self.rank == 1:
                torch.mul(t, wide, out=out)
            else:
                torch.bmm(t, wide, out=out)
        self._wide, self._spare = self._spare, self._wide


def _whitening(gram: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``(T, length, dependent)``: ``T X`` has orthonormal columns if X's Gram matrix is ``gram``.

    ``length`` ``(matrices, rank)`` is what is left of a column after subtracting its projection on those before it,
    ``dependent`` whether that is nothing but rounding.
    """
    square = gram.diagonal(dim1=-2, dim2=-1)  # (matrices, rank)
    scale = square.clamp_min(_NOTHING).rsqrt()
    if gram.shape[-1] == 1:
        return (square * scale.pow(3)).unsqueeze(-1), square.sqrt(), square <= _NOTHING  # 1 / length; of Inf it is NaN
    unit = gram * scale.unsqueeze(-1) * scale.unsqueeze(-2)
    unit.diagonal(dim1=-2, dim2=-1).add_(_SHIFT * gram.shape[-1])
    lower, _ = torch.linalg.cholesky_ex(unit)
    pivot = lower.diagonal(dim1=-2, dim2=-1)
    whiten = torch.linalg.solve_triangular(lower, torch.diag_embed(scale), upper=False)
    return whiten, pivot / scale, pivot.square() <= _DEPENDENT * gram.shape[-1]


def _inverse_root(gram: torch.Tensor) -> torch.Tensor:
    """The same for columns that are nearly orthonormal, or zero."""
    gram.diagonal(dim1=-2, dim2=-1).add_(_SHIFT)
    lower, _ = torch.linalg.cholesky_ex(gram)
    eye = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    whiten: torch.Tensor = torch.linalg.solve_triangular(lower, eye.expand_as(gram), upper=False)
    return whiten


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
