"""Small unsigned integers, packed without gaps."""

import math

import torch


class BitPacking:
    """Integers of ``width`` bits each, packed into bytes.

    The fewest integers that fill whole bytes are a group: two of 12 bits, three bytes. Its members do not lie next to
    one another: with ``n`` groups, members ``i`` are the integers from ``i * n`` on, and bytes ``b`` lie from ``b * n``
    on, so that every operation below runs over contiguous memory.

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
        """Bytes that ``count`` integers take: the last group is filled up."""
        return -(-count // self.members) * self.size

    def pack(self, numbers: torch.Tensor, out: torch.Tensor) -> None:
        """Fill ``out``, uint8 ``(bytes(n),)``, from ``numbers``, integers ``(n,)`` that are not negative."""
        rows = out.view(self.size, -1)
        grouped = torch.zeros(self.members, rows.shape[1], dtype=torch.int32, device=out.device)
        grouped.view(-1)[: numbers.numel()].copy_(numbers)
        whole = torch.zeros_like(rows, dtype=torch.int32)
        for member, byte, up in self._overlaps:
            whole[byte] |= grouped[member] << up if up >= 0 else grouped[member] >> -up
        rows.copy_(whole.bitwise_and_(255))

    def unpack(self, packed: torch.Tensor, count: int) -> torch.Tensor:
        """``count`` integers, int32 ``(count,)``, from what :meth:`pack` filled."""
        rows = packed.view(self.size, -1).int()
        grouped = torch.zeros(self.members, rows.shape[1], dtype=torch.int32, device=packed.device)
        for member, byte, up in self._overlaps:
            grouped[member] |= rows[byte] >> up if up >= 0 else rows[byte] << -up
        return grouped.bitwise_and_((1 << self.width) - 1).view(-1)[:count]
