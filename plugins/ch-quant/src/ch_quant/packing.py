"""Codes of 1, 2, 3, 4 or 8 bits in bytes, without a loop over rows.

A chunk of ``n`` codes (``n`` a multiple of 16) is cut into lanes of equal length, one after another: two for 4 bits,
four for 2, eight for 1 and for 3. Byte ``i`` has code ``i`` of every lane, lane 0 in the lowest bits. So every step is an
operation on whole contiguous lanes; neighbours packed together would be strided.

Three bits put code ``i`` of eight lanes into byte ``i`` of three rows of ``n / 8`` bytes, as one 24-bit number, whose
lowest byte is in row 0.

Codes are two's complement: shifting left until a code's sign is the byte's, and right again, decodes it.
"""

from functools import cache

import torch

WIDTHS = (8, 4, 3, 2, 1)


@cache
def _by(number: int) -> torch.Tensor:
    """A shift or a mask as torch wants it: a plain number is made a tensor, and that cast, at every call."""
    return torch.tensor(number, dtype=torch.int8, device="cpu")


def packed_bytes(numel: int, bits: int) -> int:
    """Bytes of ``numel`` codes, which is a multiple of 16."""
    return numel * bits // 8


def pack(codes: torch.Tensor, bits: int, out: torch.Tensor, spare: torch.Tensor) -> None:
    """Put the low ``bits`` of every code into ``out``.

    Args:
        codes: ``(n,)`` int8, ``n`` a multiple of 16.
        bits: 8, 4, 3, 2 or 1.
        out: ``(n * bits / 8,)`` int8.
        spare: int8, at least ``n / 2``, overwritten.

    Example:
        >>> import torch
        >>> codes = torch.tensor([1, -1] * 8, dtype=torch.int8)
        >>> out, spare = torch.empty(8, dtype=torch.int8), torch.empty(8, dtype=torch.int8)
        >>> pack(codes, 4, out, spare)
        >>> out[:2].tolist()  # codes 0 and 8, codes 1 and 9
        [17, -1]
    """
    if bits == 8:
        out.copy_(codes)
    elif bits == 3:
        _pack3(codes.view(8, -1), out.view(3, -1), spare)
    else:
        lanes = codes.view(8 // bits, -1)
        last, mask = len(lanes) - 1, (1 << bits) - 1
        spare = spare[: out.numel()]
        torch.bitwise_left_shift(lanes[last], _by(bits * last), out=out)  # what stands above the code leaves the byte
        for k in range(last - 1, -1, -1):
            torch.bitwise_and(lanes[k], _by(mask), out=spare)
            if k:
                spare.bitwise_left_shift_(_by(bits * k))
            out.bitwise_or_(spare)


def unpack(packed: torch.Tensor, bits: int, out: torch.Tensor) -> None:
    """Codes ``(n,)`` int8, from ``-2 ** (bits - 1)``, of what :func:`pack` has packed.

    Example:
        >>> import torch
        >>> out = torch.empty(16, dtype=torch.int8)
        >>> unpack(torch.full((8,), 17, dtype=torch.int8), 4, out)
        >>> out.unique().tolist()
        [1]
    """
    if bits == 8:
        out.copy_(packed)
    elif bits == 3:
        _unpack3(packed.view(3, -1), out.view(8, -1))
    else:
        lanes = out.view(8 // bits, -1)
        for k, lane in enumerate(lanes):
            left = 8 - bits * (k + 1)
            source = torch.bitwise_left_shift(packed, _by(left), out=lane) if left else packed
            torch.bitwise_right_shift(source, _by(8 - bits), out=lane)


def _pack3(lanes: torch.Tensor, rows: torch.Tensor, spare: torch.Tensor) -> None:
    spare = spare[: rows.shape[1]]
    for row, parts in zip(rows, _PLACES, strict=True):
        for number, (lane, left, mask) in enumerate(parts):
            target = spare if number else row
            shift = torch.bitwise_left_shift if left >= 0 else torch.bitwise_right_shift
            shift(lanes[lane], _by(abs(left)), out=target)
            target.bitwise_and_(_by(mask))
            if number:
                row.bitwise_or_(spare)


def _unpack3(rows: torch.Tensor, lanes: torch.Tensor) -> None:
    for lane, (row, left) in _WHOLE.items():
        torch.bitwise_left_shift(rows[row], _by(left), out=lanes[lane]).bitwise_right_shift_(_by(5))
    for lane, (row, right, mask, left) in _CUT.items():
        part = torch.bitwise_left_shift(rows[row + 1], _by(left), out=lanes[lane])  # its upper bits
        part.bitwise_or_((rows[row] >> _by(right)).bitwise_and_(_by(mask)))
        part.bitwise_left_shift_(_by(5)).bitwise_right_shift_(_by(5))


# byte of a row: (lane, by how much its code is shifted left, the bits of the byte that it then has)
_PLACES = (
    ((0, 0, 0b00000111), (1, 3, 0b00111000), (2, 6, -64)),
    ((2, -2, 0b00000001), (3, 1, 0b00001110), (4, 4, 0b01110000), (5, 7, -128)),
    ((5, -1, 0b00000011), (6, 2, 0b00011100), (7, 5, -32)),
)
_WHOLE = {
    0: (0, 5),
    1: (0, 2),
    3: (1, 4),
    4: (1, 1),
    6: (2, 3),
    7: (2, 0),
}  # lane: row, shift that puts its sign on top
_CUT = {2: (0, 6, 3, 2), 5: (1, 7, 1, 1)}  # lane: row of its low bits, where, how many, and where its upper bits belong
