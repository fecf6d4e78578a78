"""How the chosen values travel in fewer than 32 bits: in bf16, or as a sign and one of two levels."""

from typing import Protocol

import torch

from ch_sparse.bits import BitPacking
from ch_sparse.chunks import Chunks

SMALLEST = 1e-36  # a divisor whose reciprocal is finite


class Values(Protocol):
    """Turns values into a part of a message and back."""

    def bytes(self, chunks: Chunks) -> int:
        """Of a message's part, an even number."""
        ...

    def encode(self, chosen: torch.Tensor, chunks: Chunks, part: torch.Tensor) -> None:
        """Fill ``part``, uint8, from ``chosen`` ``(rows, k)`` fp32, the largest magnitude of each row first."""
        ...

    def decode(self, part: torch.Tensor, chunks: Chunks) -> torch.Tensor:
        """The values of all entries, ``(total,)`` fp32, from a part that :meth:`encode` filled."""
        ...


class Half:
    """Values in bf16, which has fp32's range."""

    def bytes(self, chunks: Chunks) -> int:
        return 2 * chunks.total

    def encode(self, chosen: torch.Tensor, chunks: Chunks, part: torch.Tensor) -> None:
        part.view(torch.bfloat16).copy_(chunks.entries(chosen))

    def decode(self, part: torch.Tensor, chunks: Chunks) -> torch.Tensor:
        return part.view(torch.bfloat16).float()


class TwoLevels:
    """A sign and a level for each value, 2 bits, and two levels in bf16 for each chunk.

    The levels are the best two for the chunk: its magnitudes, in descending order, are split where the squared
    error from the means of the two sides is smallest. A value that is not finite makes the upper level NaN or Inf.
    """

    packing = BitPacking(2)

    def bytes(self, chunks: Chunks) -> int:
        return 4 * chunks.rows + self._codes(chunks)

    def _codes(self, chunks: Chunks) -> int:
        return -(-self.packing.bytes(chunks.total) // 2) * 2  # even, so that what follows may be anything

    def encode(self, chosen: torch.Tensor, chunks: Chunks, part: torch.Tensor) -> None:
        place = torch.arange(chunks.k, dtype=torch.float32, device=chosen.device)  # (k,)
        magnitude = chosen.abs().masked_fill_(place >= chunks.counts, 0.0)  # (rows, k)
        unit = magnitude[:, :1].clamp(min=SMALLEST)  # squares of the quotient do not overflow
        sums = magnitude.div_(unit).cumsum_(1)
        rest = sums[:, -1:] - sums
        above, below = place + 1.0, (chunks.counts - place - 1.0).clamp_(min=1.0)  # how many values on each side
        # The squared error is that of the values around zero, less this.
        split = (sums * sums / above + rest * rest / below).argmax(1, keepdim=True)  # the last place above
        levels = part[: 4 * chunks.rows].view(torch.bfloat16).view(-1, 2)
        levels[:, :1] = sums.gather(1, split) / (split.float() + 1.0) * unit
        levels[:, 1:] = rest.gather(1, split) / below.gather(1, split) * unit
        codes = (chosen < 0).int() + 2 * (place > split).int()
        used = self.packing.bytes(chunks.total)
        self.packing.pack(chunks.entries(codes), part[4 * chunks.rows :][:used])

    def decode(self, part: torch.Tensor, chunks: Chunks) -> torch.Tensor:
        levels = part[: 4 * chunks.rows].view(torch.bfloat16).float()  # (2 rows,)
        packed = part[4 * chunks.rows :][: self.packing.bytes(chunks.total)]
        codes = self.packing.unpack(packed, chunks.total)  # (total,)
        value = levels[2 * chunks.row + (codes >> 1)]
        return torch.where((codes & 1).bool(), -value, value)


VALUES: dict[int, Values | None] = {32: None, 16: Half(), 2: TwoLevels()}
"""By ``bits``; ``None`` is fp32, a message of its own."""
