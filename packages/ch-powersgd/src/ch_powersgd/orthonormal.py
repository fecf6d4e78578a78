"""Orthonormal columns for P and Q.

The method is Cholesky-QR, applied twice: X <- L^-1 X with L L^T = X X^T. Its precision does not depend on the length
of each column. It runs in fp64, because squaring squares the condition number. Nothing branches on numbers. A column
that depends on earlier columns, to the precision of fp32, becomes zero or a replacement. NaN stays NaN.
"""

import torch

# Relative to a column's squared length: fp64 rounding left over from a dependent column.
_SHIFT = 1e-13
# Relative to a column's squared length: below this share an fp32 column holds rounding only (four parts per million).
_DEPENDENT = 1.6e-11
# Squared lengths below this count as zero, so that products with their inverse stay inside fp32.
_ZERO = 1e-60


class Columns:
    """Columns of many factors of one rank, orthonormalised together.

    Args:
        parts: batches ``(matrices, rank, length)``, fp32 or fp64, changed in place. Columns are the rows of the last two
            dimensions.
    """

    def __init__(self, parts: list[torch.Tensor]) -> None:
        self.parts, self.rank = parts, parts[0].shape[1]
        self._counts = [len(part) for part in parts]
        pairs = [[torch.empty_like(part, dtype=torch.float64) for part in parts] for _ in range(2)]
        self._wide, self._spare = ([(wide, wide.mT) for wide in each] for each in pairs)
        wide = pairs[0][0]
        self._gram = wide.new_empty((sum(self._counts), self.rank, self.rank))  # inner products of all columns
        self._grams = self._gram.split_with_sizes(self._counts)
        self._squares = self._gram.diagonal(dim1=-2, dim2=-1)  # (matrices, rank)
        self._eye = torch.eye(self.rank, dtype=wide.dtype, device=wide.device).expand_as(self._gram)
        self._gap = self._gram.new_empty((*self._squares.shape, 1))
        self._gaps = self._gap.split_with_sizes(self._counts)

    def orthonormalise(self, replacements: list[torch.Tensor] | None = None, epsilon: float = 0.0) -> None:
        """Make the columns orthonormal, in place.

        Args:
            replacements: unit columns shaped as ``parts``. They replace dependent columns, which otherwise become zero.
            epsilon: added to each column's length before the division. It damps columns much shorter than this.
        """
        torch._foreach_copy_([wide for wide, _ in self._wide], self.parts)
        self._multiply()
        whiten, length, dependent = self._whiten()
        self._apply(whiten.masked_fill_(dependent, 0.0))
        if replacements is not None:
            self._gap.copy_(dependent)
            torch._foreach_addcmul_([wide for wide, _ in self._wide], self._gaps, replacements)
        if self.rank > 1:
            self._multiply()
            self._squares.add_(_SHIFT)
            self._apply(self._inverse_root()[0])
        made = [wide for wide, _ in self._wide]
        if epsilon:
            torch._foreach_mul_(made, (length / (length + epsilon)).split_with_sizes(self._counts))
        torch._foreach_copy_(self.parts, made)

    def _multiply(self) -> None:
        """Compute ``X X^T`` of every matrix."""
        for (wide, transposed), gram in zip(self._wide, self._grams, strict=True):
            torch.bmm(wide, transposed, out=gram)

    def _whiten(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return ``(T, length, dependent)``, where ``T X`` has orthonormal columns.

        ``length`` ``(matrices, rank, 1)`` is the length of a column minus its projection on earlier columns.
        ``dependent`` is True if that length is rounding only.
        """
        if self.rank == 1:
            length = self._gram.sqrt()
            inverse = self._gram * self._gram.clamp_min(_ZERO).rsqrt().pow(3)  # 1 / length would turn Inf into 0
            return inverse, length, self._gram <= _ZERO
        squares = self._squares.mul_(1 + _SHIFT * self.rank).clamp_min_(2 * _ZERO)
        whiten, length = self._inverse_root()
        zero, rounding = squares <= 2 * _ZERO, squares * (_DEPENDENT * self.rank)
        return whiten, length, (length.square() <= rounding.unsqueeze(-1)) | zero.unsqueeze(-1)

    def _inverse_root(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``L^-1`` of ``L L^T = X X^T`` and the diagonal of ``L``, equally precise for short and long columns."""
        lower, _ = torch.linalg.cholesky_ex(self._gram)
        inverse = torch.linalg.solve_triangular(lower, self._eye, upper=False)
        return inverse, lower.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)

    def _apply(self, left: torch.Tensor) -> None:
        """Replace X by ``left X``."""
        product = torch.mul if self.rank == 1 else torch.bmm
        for part, (wide, _), (out, _) in zip(left.split_with_sizes(self._counts), self._wide, self._spare, strict=True):
            product(part, wide, out=out)
        self._wide, self._spare = self._spare, self._wide
