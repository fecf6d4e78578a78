"""The two kernels of :mod:`ch_quant.triton_codec`, with the same bytes as :class:`ch_quant.codec.Workspace`.

A chunk of ``rows`` blocks is one lane of codes (8 bits) or two (4 bits). A block is cut into as many *pieces* as there are
lanes, so every lane has ``rows`` pieces, even if a lane ends in the middle of a block. A program makes the bytes of some pieces.
It loads the same pieces of every lane. If a piece is half a block, it also loads the other half for the scale.

Three things keep the bits equal to torch's. The kernel finds the largest magnitude among bit patterns, which are in the order
of the numbers, with NaN above Inf. It rounds a scale to bf16 in integers, because Triton's own cast differs in its interpreter.
And it rounds products before it adds to them: without ``enable_fp_fusion=False`` at the call, a GPU would round both at once.
"""

import triton
import triton.language as tl


@triton.jit
def _bf16(number):
    """Bits of a positive fp32 number or NaN, rounded to bf16, halves to even."""
    bits = number.to(tl.int32, bitcast=True)
    top = bits >> 16
    up = ((bits & 0xFFFF) + 0x7FFF + (top & 1)) >> 16
    return tl.where(bits > 0x7F800000, 0x7FFF, top + up)


@triton.jit
def _reach(found, SIGN: tl.constexpr):
    """Bits of the largest magnitude of each row on one side of zero: NaN has a side, too. ``SIGN``: flips the other."""
    return tl.max(tl.maximum(found.to(tl.int32, bitcast=True) ^ SIGN, 0), 1)


@triton.jit(do_not_specialize=["rows"])
def encode(
    x,
    scales,
    packed,
    decoded,
    rows,
    share,
    share_of_other,
    most,
    PIECE: tl.constexpr,
    LANES: tl.constexpr,
    PIECES: tl.constexpr,
    WIDTH: tl.constexpr,
    LOPSIDED: tl.constexpr,
    KEEP: tl.constexpr,
):
    """Write scales and packed codes of ``x``, and with ``KEEP`` the decoded numbers.

    ``x`` and ``decoded`` are fp32, ``rows`` blocks; ``scales`` bf16 as int16, one a block; ``packed`` int8. A scale is
    ``share`` times a block's largest magnitude. With ``LOPSIDED`` only the farther side counts, and the scale
    is at least ``share_of_other`` times the largest magnitude of the other side. ``most`` is the largest reciprocal of a scale.
    ``PIECE`` is the numbers of a piece, ``WIDTH``
    the next power of two, ``PIECES`` how many of each of the ``LANES`` a program treats.
    """
    BITS: tl.constexpr = 8 // LANES
    here = tl.program_id(0).to(tl.int64) * PIECES + tl.arange(0, PIECES)
    columns = tl.arange(0, WIDTH)[None, :]
    exists = here < rows
    inside = exists[:, None] & (columns < PIECE)
    byte = tl.zeros([PIECES, WIDTH], tl.int32)
    for lane in tl.static_range(LANES):
        piece = here + lane * rows
        place = (piece * PIECE)[:, None] + columns
        own = tl.load(x + place, mask=inside, other=0.0)
        up, down = _reach(own, 0), _reach(own, -2147483648)
        for further in tl.static_range(1, LANES):
            other = piece // LANES * LANES + (piece + further) % LANES
            found = tl.load(x + (other * PIECE)[:, None] + columns, mask=inside, other=0.0)
            up, down = tl.maximum(up, _reach(found, 0)), tl.maximum(down, _reach(found, -2147483648))
        size = (tl.maximum(up, down).to(tl.float32, bitcast=True) * share).to(tl.int32, bitcast=True)
        if LOPSIDED:
            least = tl.minimum(up, down).to(tl.float32, bitcast=True) * share_of_other
            size = tl.maximum(size, least.to(tl.int32, bitcast=True))
        bits = _bf16(size.to(tl.float32, bitcast=True))
        if LOPSIDED:
            bits = tl.where(up > down, bits | 0x8000, bits)
        tl.store(scales + piece // LANES, bits.to(tl.int16), mask=exists & (piece % LANES == 0))
        scale = (bits << 16).to(tl.float32, bitcast=True)
        inverse = tl.div_rn(tl.full([PIECES], 1.0, tl.float32), scale)
        inverse = tl.where(inverse > most, most, inverse)  # a minimum would drop NaN
        inverse = tl.where(inverse < -most, -most, inverse)
        y = own * inverse[:, None]
        # Numbers near 1.5 * 2^23 have no fraction: the sum is y rounded, halves to even, in its lowest bits.
        code = (y + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000
        code = tl.where(y == y, code, 0)
        byte = byte | ((code & ((1 << BITS) - 1)) << (BITS * lane))
        if KEEP:  # with the sign of y, because torch rounds small negative numbers to -0.0
            signed = code.to(tl.float32).to(tl.int32, bitcast=True) | (y.to(tl.int32, bitcast=True) & -2147483648)
            tl.store(decoded + place, signed.to(tl.float32, bitcast=True) * scale[:, None], mask=inside)
    tl.store(packed + (here * PIECE)[:, None] + columns, byte.to(tl.int8), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def decode(
    scales,
    packed,
    out,
    rows,
    factor,
    PIECE: tl.constexpr,
    LANES: tl.constexpr,
    PIECES: tl.constexpr,
    WIDTH: tl.constexpr,
    ADD: tl.constexpr,
):
    """``factor`` times the numbers of a chunk, in ``out``, or with ``ADD`` added to it; arguments as in :func:`encode`."""
    BITS: tl.constexpr = 8 // LANES
    here = tl.program_id(0).to(tl.int64) * PIECES + tl.arange(0, PIECES)
    columns = tl.arange(0, WIDTH)[None, :]
    exists = here < rows
    inside = exists[:, None] & (columns < PIECE)
    byte = tl.load(packed + (here * PIECE)[:, None] + columns, mask=inside, other=0).to(tl.int32)
    for lane in tl.static_range(LANES):
        piece = here + lane * rows
        bits = tl.load(scales + piece // LANES, mask=exists, other=0).to(tl.int32)
        scale = (bits << 16).to(tl.float32, bitcast=True) * factor
        code = (byte << (32 - BITS * (lane + 1))) >> (32 - BITS)  # its sign on top, and back
        number = code.to(tl.float32) * scale[:, None]
        place = out + (piece * PIECE)[:, None] + columns
        if ADD:
            number = tl.load(place, mask=inside, other=0.0) + number
        tl.store(place, number, mask=inside)


INTERPRETED = not isinstance(encode, triton.JITFunction)
"""True if Triton's interpreter runs them on a CPU (``TRITON_INTERPRET=1`` before the import)."""
