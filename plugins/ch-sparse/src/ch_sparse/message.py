"""Messages of one bucket: packed places and values of the chosen entries, gathered from all ranks.

Values travel in fp32, in bf16, or as a sign and one of two levels. Places are small integers, packed without gaps.
"""

import math
from collections.abc import Iterator
from typing import Protocol

import torch

from ch_sparse.chunks import Chunks
from commhooks import AllGather, StepContext

SMALLEST = 1e-36  # a divisor whose reciprocal is finite


class BitPacking:
    """Integers of ``width`` bits each, packed into bytes.

    The fewest integers that fill whole bytes are a group: two of 12 bits, three bytes. With
    ``n`` groups, members ``i`` are the integers from ``i * n``, and bytes ``b`` lie from ``b * n``. So every operation
    below runs over contiguous memory.

    Args:
        width: bits of an integer, 1 to 16.

    Example:
        >>> twelve = BitPacking(12)
        >>> packed = torch.empty(twelve.bytes(3), dtype=torch.uint8)  # two groups
        >>> twelve.pack(torch.tensor([1, 2, 4095]), packed)
        >>> packed.numel(), twelve.unpack(packed, 3).tolist()
        (6, [1, 2, 4095])
    """

    def __init__(self, width: int) -> None:
        if not 1 <= width <= 16:
            raise ValueError(f"width={width}: expected 1 to 16 bits")
        self.width = width
        self.members = 8 // math.gcd(8, width)
        self.size = self.members * width // 8  # bytes of a group
        # (member, byte, how far the member's lowest bit lies above the byte's), of all pairs that overlap
        pairs = ((i, b, i * width - 8 * b) for b in range(self.size) for i in range(self.members))
        self._overlaps = [(i, b, up) for i, b, up in pairs if -width < up < 8]

    def bytes(self, count: int) -> int:
        """Return the bytes of ``count`` integers, with the last group filled up."""
        return -(-count // self.members) * self.size

    def pack(self, numbers: torch.Tensor, out: torch.Tensor) -> None:
        """Fill ``out``, uint8 ``(bytes(n),)``, from ``numbers``, non-negative integers ``(n,)``."""
        rows = out.view(self.size, -1)
        grouped = torch.zeros(self.members, rows.shape[1], dtype=torch.int32, device=out.device)
        grouped.view(-1)[: numbers.numel()].copy_(numbers)
        whole = torch.zeros_like(rows, dtype=torch.int32)
        for member, byte, up in self._overlaps:
            whole[byte] |= grouped[member] << up if up >= 0 else grouped[member] >> -up
        rows.copy_(whole.bitwise_and_(255))

    def unpack(self, packed: torch.Tensor, count: int) -> torch.Tensor:
        """Return ``count`` integers, int32 ``(count,)``, from the bytes of :meth:`pack`."""
        rows = packed.view(self.size, -1).int()
        grouped = torch.zeros(self.members, rows.shape[1], dtype=torch.int32, device=packed.device)
        for member, byte, up in self._overlaps:
            grouped[member] |= rows[byte] >> up if up >= 0 else rows[byte] << -up
        return grouped.bitwise_and_((1 << self.width) - 1).view(-1)[:count]


class Values(Protocol):
    """Encodes values as a part of a message."""

    def bytes(self, chunks: Chunks) -> int:
        """Return the bytes of the message's part, an even number."""
        ...

    def encode(self, chosen: torch.Tensor, chunks: Chunks, part: torch.Tensor) -> None:
        """Fill ``part``, uint8, from ``chosen`` ``(rows, k)`` fp32, the largest magnitude of each row first."""
        ...

    def decode(self, part: torch.Tensor, chunks: Chunks) -> torch.Tensor:
        """Return the values of all entries, ``(total,)`` fp32, from a part that :meth:`encode` has filled."""
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

    The levels are the best two for the chunk. Its sorted magnitudes are split at the smallest squared error from the
    means of the two sides. A value that is not finite makes the upper level NaN or Inf.
    """

    packing = BitPacking(2)

    def bytes(self, chunks: Chunks) -> int:
        return 4 * chunks.rows + self._codes(chunks)

    def _codes(self, chunks: Chunks) -> int:
        return -(-self.packing.bytes(chunks.total) // 2) * 2  # even, so that any dtype of the next part is aligned

    def encode(self, chosen: torch.Tensor, chunks: Chunks, part: torch.Tensor) -> None:
        place = torch.arange(chunks.k, dtype=torch.float32, device=chosen.device)  # (k,)
        magnitude = chosen.abs().masked_fill_(place >= chunks.counts, 0.0)  # (rows, k)
        unit = magnitude[:, :1].clamp(min=SMALLEST)  # squares of the quotient do not overflow
        sums = magnitude.div_(unit).cumsum_(1)
        rest = sums[:, -1:] - sums
        above, below = place + 1.0, (chunks.counts - place - 1.0).clamp_(min=1.0)  # number of values on each side
        # The split with the largest gain has the smallest squared error.
        split = (sums * sums / above + rest * rest / below).argmax(1, keepdim=True)  # the last place above
        levels = part[: 4 * chunks.rows].view(torch.bfloat16).view(-1, 2)
        levels[:, :1] = sums.gather(1, split) / (split + 1) * unit
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
"""Bits -> encoding; ``None`` is fp32, which travels as a separate message."""


class SparseExchange:
    """Sends a bucket's entries to all ranks.

    A rank's message holds the values, the packed places, and at most one byte of padding, which aligns the next rank's
    message for bf16. Values in fp32 are a separate message, which a 16-bit wrapper may round.

    Args:
        chunks: layout of the entries.
        values: encoding of their values; ``None`` for fp32.
        places: packing of their places in the chunks.
        ctx: the step.
        device: of the bucket.
    """

    def __init__(
        self, chunks: Chunks, values: Values | None, places: BitPacking, ctx: StepContext, device: torch.device
    ) -> None:
        self.chunks, self.values, self.places = chunks, values, places
        self.split = values.bytes(chunks) if values is not None else 0  # first byte of the places
        self.end = self.split + places.bytes(chunks.total)
        size = self.end + self.end % 2
        self.mine = ctx.scratch("mine", (size,), torch.uint8, device)
        self.everyone = ctx.scratch("everyone", (ctx.world_size, size), torch.uint8, device)
        if values is None:
            self.exact, self.rounded = (
                ctx.scratch(name, (chunks.total,), device=device) for name in ("exact", "rounded")
            )
            self.received = ctx.scratch("received", (ctx.world_size, chunks.total), device=device)

    def requests(self, chosen: torch.Tensor, columns: torch.Tensor) -> tuple[AllGather, ...]:
        """Return the requests that send values and their columns in the grid, ``(rows, k)`` each, the largest of a row first."""
        self.mine[self.end :].zero_()
        self.places.pack(self.chunks.entries(columns), self.mine[self.split : self.end])
        packed = AllGather(self.mine, self.everyone.view(-1))
        if self.values is not None:
            self.values.encode(chosen, self.chunks, self.mine[: self.split])
            return (packed,)
        self.exact.copy_(self.chunks.entries(chosen))
        return packed, AllGather(self.exact, self.received.view(-1), castable=True, sent=self.rounded)

    def own(self) -> torch.Tensor:
        """Return this rank's values as its peers receive them, ``(total,)`` fp32. Call it after the requests."""
        return self.values.decode(self.mine[: self.split], self.chunks) if self.values is not None else self.rounded

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield, for each rank in order, positions in the flat grid, int64, and values, fp32, both ``(total,)``."""
        for rank, message in enumerate(self.everyone):
            columns = self.places.unpack(message[self.split : self.end], self.chunks.total)
            values = self.values.decode(message[: self.split], self.chunks) if self.values else self.received[rank]
            yield self.chunks.positions(columns), values
