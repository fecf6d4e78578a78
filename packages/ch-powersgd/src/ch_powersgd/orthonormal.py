"""Orthonormal columns for P and Q.

Orthonormalising is Cholesky-QR, twice: X <- L^-1 X with L L^T = X X^T, whose precision does not depend on how long each
column is. All of it is done in fp64, because squaring squares the condition number. Nothing branches on numbers: a
column that depends on the ones before it, to the precision of fp32, is zeroed or replaced, and NaN stays NaN.
"""

import torch

# Of a column of length one, in units of squared length: what fp64 rounding may leave of a dependent column, and the
# part below which an fp32 column holds nothing but rounding (four parts in a million of its length).
_SHIFT = 1e-13
_DEPENDENT = 1.6e-11
# Lengths below 1e-30 count as zero, so that what they are multiplied with stays within fp32.
_NOTHING = 1e-60


class Columns:
    """The columns of many factors of one rank, and what it takes to make them orthonormal for the same span.

    Args:
        parts: batches ``(matrices, rank, length)``, the columns being the rows of the last two dimensions; fp32 or
            fp64. They are changed in place.
    """

    def __init__(self, parts: list[torch.Tensor]) -> None:
        self.parts, self.rank = parts, parts[0].shape[1]
        self._counts = [len(part) for part in parts]
        pairs = [[torch.empty_like(part, dtype=torch.float64) for part in parts] for _ in range(2)]
        self._wide, self._spare = ([(wide, wide.mT) for wide in each] for each in pairs)
        wide = pairs[0][0]
        self._gram = wide.new_empty((sum(self._counts), self.rank, self.rank))  # products of all columns
        self._grams = self._gram.split_with_sizes(self._counts)
        self._squares = self._gram.diagonal(dim1=-2, dim2=-1)  # (matrices, rank)
        self._eye = torch.eye(self.rank, dtype=wide.dtype, device=wide.device).expand_as(self._gram)
        self._gap = self._gram.new_empty((*self._squares.shape, 1))
        self._gaps = self._gap.split_with_sizes(self._counts)

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
        self._apply(whiten.masked_fill_(dependent, 0.0))
        if noise is not None:
            self._gap.copy_(dependent)
            torch._foreach_addcmul_([wide for wide, _ in self._wide], self._gaps, noise)
        if self.rank > 1:
            self._multiply()
            self._squares.add_(_SHIFT)
            self._apply(self._inverse_root()[0])
        made = [wide for wide, _ in self._wide]
        if epsilon:
            torch._foreach_mul_(made, (length / (length + epsilon)).split_with_sizes(self._counts))
        torch._foreach_copy_(self.parts, made)

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
        """``L^-1`` of ``L L^T = X X^T``, and the diagonal of ``L``, both as precise for short columns as for long."""
        lower, _ = torch.linalg.cholesky_ex(self._gram)
        inverse = torch.linalg.solve_triangular(lower, self._eye, upper=False)
        return inverse, lower.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)

    def _apply(self, left: torch.Tensor) -> None:
        """``X <- left X``."""
        product = torch.mul if self.rank == 1 else torch.bmm
        for part, (wide, _), (out, _) in zip(left.split_with_sizes(self._counts), self._wide, self._spare, strict=True):
            product(part, wide, out=out)
        self._wide, self._spare = self._spare, self._wide
