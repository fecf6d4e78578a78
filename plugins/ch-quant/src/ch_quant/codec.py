"""A block of numbers as one 16-bit scale and codes of a few bits, and back.

A block of ``block`` numbers ``x`` travels as a scale ``s`` (bf16) and codes ``q`` of b bits:

* 8 and 4 bits, *mid-tread*: ``q = round(x / s)`` with ``L = 2^(b-1) - 1`` (127, 7), decoded as ``q s``. Zero is a level
  (QSGD, arXiv:1610.02132; blocks as in ZeRO++'s qgZ, arXiv:2306.10209). 8 bits: ``s = max|x| / L``, codes from -L to L.
* 4 bits have few levels, and one more, ``-(L + 1)``, for the side that reaches farther. ``s`` is negative if that is
  the positive side (as in ggml's Q4_0). With M the largest magnitude, and N the largest on the other side,
  ``|s| = max(M / (L + 1), N / L)``, and nothing is clipped. The squared error is a fifth smaller than with ``M / L``.
  ``M / (L + 1/2)`` would do as well, but makes the largest number of every block smaller, at both stages.
* 2 and 1 bits, *mid-rise*: levels ``(q + 1/2) 2h`` with ``q = floor(x / 2h)``. For 1 bit ``h = mean|x|``, which is
  signSGD with the mean magnitude of the block (Karimireddy et al. 2019, arXiv:1901.09847). For 2 bits ``h = 0.7 mean|x|``,
  with levels at 0.7 and 2.1 times the mean magnitude. 0.7 lies between the best values for normal numbers (0.62) and for
  Laplace's (0.77). Larger numbers are clipped.

*Stochastic rounding* draws between the two neighbouring levels so that the mean is ``x``. It clips nothing, because the outermost
level is ``max|x|``, and the scale is rounded up.

The scale has 8 significant bits and the range of fp32. The codes are made with the scale as it travels, so that its
rounding costs no accuracy. A block with NaN or Inf has a scale that is not finite, so it decodes to NaN or Inf for all
codes. A block of zeros decodes to zeros. Numbers below 1e-34 lose accuracy. Numbers within half
a per cent of fp32's largest may become Inf at 4 and 1 bits, and with stochastic rounding.

In a message of ``rows`` blocks all scales stand first, then the codes in chunks.

Codes of 1, 2, 4 or 8 bits are packed into bytes without a loop over rows. A chunk of ``n`` codes (``n`` a multiple of 16) is
cut into lanes of equal length, one after another: two for 4 bits, four for 2, eight for 1. Byte ``i`` has code ``i``
of every lane, lane 0 in the lowest bits, so every step works on whole contiguous lanes. Codes are two's complement. A shift to
the left, until a code's sign is the byte's, and one to the right decode it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal, NamedTuple

import torch

from ch_quant.sizes import SIZES
from commhooks import StepContext

WIDTHS = (8, 4, 2, 1)
LARGEST = 1e36  # of a scale's reciprocal; without the limit the reciprocals of smaller scales are infinite
UP = 1.0 + 2.0**-7  # more than bf16 may round a scale down
TWO_BITS = 0.7  # half a step of 2 bits, in mean magnitudes


@dataclass(frozen=True)
class Codec:
    """Format of the numbers on the wire.

    Args:
        bits: 8, 4, 2 or 1.
        block: numbers that share a scale, a multiple of 16.
        rounding: ``"nearest"`` or ``"stochastic"``.

    Example:
        >>> Codec(4, 128).bytes(2)  # of 256 numbers: 2 scales and 256 half bytes
        132
    """

    bits: int
    block: int
    rounding: Literal["nearest", "stochastic"] = "nearest"

    @property
    def centred(self) -> bool:
        """True if zero is a level (mid-tread)."""
        return self.bits > 2

    @property
    def lopsided(self) -> bool:
        """True if the side that reaches farther has one more level."""
        return self.bits == 4 and self.rounding == "nearest"

    @property
    def shares(self) -> tuple[float, float]:
        """Factors from a block's reach to its scale, for the farther side and as a minimum for the other side."""
        last = (1 << (self.bits - 1)) - 1
        return 1.0 / (last + 1), 1.0 / last

    @property
    def chunk(self) -> int:
        """Blocks in a chunk."""
        return max(1, SIZES.chunk_elements // self.block)

    def bytes(self, rows: int) -> int:
        """Return the bytes of a message of ``rows`` blocks, an even number, so that the next message is aligned."""
        return rows * (2 + packed_bytes(self.block, self.bits))

    def split(self, message: torch.Tensor, rows: int, first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return scales, ``(count, 1)`` bf16, and packed codes, int8, of ``count`` blocks from ``first`` of a message."""
        each = packed_bytes(self.block, self.bits)
        start = 2 * rows + first * each
        scales = message.view(torch.bfloat16)[first : first + count, None]
        return scales, message.view(torch.int8)[start : start + count * each]


class _Views(NamedTuple):
    """Views of a workspace's memory for chunks of one length.

    Attributes:
        y: ``(rows, block)`` fp32.
        codes: ``(rows, block)`` int8.
        lanes: views of the codes, see :func:`in_lanes`.
        spare: int8, a lane.
        of_blocks: five tensors ``(rows, 1)`` fp32. The first holds the scales.
    """

    y: torch.Tensor
    codes: torch.Tensor
    lanes: tuple[torch.Tensor, ...]
    spare: torch.Tensor
    of_blocks: tuple[torch.Tensor, ...]


class Workspace:
    """Memory for one chunk, and the arithmetic on it: :meth:`encode`, :meth:`decode`.

    Args:
        codec: the format.
        ctx: gives the scratch memory.
        device: of the numbers.
        rows: number of blocks in the largest chunk.

    Attributes:
        x, y: ``(rows, block)`` fp32, for the caller; both methods overwrite ``y``.
        spare: of the same shape; a rotation overwrites it.
    """

    def __init__(self, codec: Codec, ctx: StepContext, device: torch.device, rows: int) -> None:
        self.codec = codec
        self.x, self.y, self.spare, self.total = (
            self._scratch(ctx, name, (rows, codec.block), device) for name in ("x", "y", "spare", "total")
        )
        self._make(ctx, device, rows)

    def _make(self, ctx: StepContext, device: torch.device, rows: int) -> None:
        """Allocate further memory for the arithmetic."""
        self._codes, self._lane = (
            self._scratch(ctx, name, (rows, self.codec.block), device, torch.int8) for name in ("codes", "lane")
        )
        self._of_blocks = self._scratch(ctx, "of blocks", (5, rows, 1), device)
        self._views: dict[int, _Views] = {}

    def _of(self, rows: int) -> _Views:
        """Return the views for chunks of this length, made once. Between passes over a chunk each call costs microseconds."""
        found = self._views.get(rows)
        if found is None:
            codes = self._codes[:rows]
            lanes = in_lanes(codes.view(-1), self.codec.bits)
            spare, of_blocks = self._lane.view(-1)[: len(lanes[0])], self._of_blocks[:, :rows].unbind()
            found = self._views[rows] = _Views(self.y[:rows], codes, lanes, spare, of_blocks)
        return found

    def _scratch(
        self,
        ctx: StepContext,
        name: str,
        shape: tuple[int, ...],
        device: torch.device,
        dtype: torch.dtype = torch.float32,
    ) -> torch.Tensor:
        """Return memory for a chunk. On a CPU all buckets share it; elsewhere a chunk is as large as its part."""
        return ctx.scratch(f"chunk of {self.codec.block}: {name}", shape, dtype, device, brief=device.type == "cpu")

    def encode(
        self,
        x: torch.Tensor,
        scales: torch.Tensor,
        packed: torch.Tensor,
        noise: torch.Generator | None,
        keep: bool = False,
    ) -> None:
        """Fill scales and codes from ``x``, ``(rows, block)`` fp32, which does not change.

        Args:
            x: the numbers.
            scales: from :meth:`Codec.split`.
            packed: likewise.
            noise: random numbers of stochastic rounding.
            keep: True if :meth:`decoded` is called next.
        """
        codec, (y, codes, lanes, spare, of_blocks) = self.codec, self._of(len(x))
        scale, inverse, *_ = of_blocks
        half = self._measure(x, y, *of_blocks)
        scales.copy_(scale.mul_(UP) if noise is not None else scale)
        # NaN and Inf spread to every decoded number of the block.
        inverse.copy_(scales).reciprocal_().clamp_(-LARGEST, LARGEST)
        torch.mul(x, inverse.mul_(half) if half != 1.0 else inverse, out=y)
        low = -(1 << (codec.bits - 1))
        if noise is not None:
            draw = self.spare[: len(x)].uniform_(generator=noise)
            y.add_(draw if codec.centred else draw.sub_(0.5)).floor_()
        elif codec.centred:
            y.round_()
        else:
            y.floor_()
        if not codec.centred:
            y.clamp_(low, -low - 1)
        if codec.bits == 8:
            packed.view(y.shape).copy_(y)
        else:
            codes.copy_(y)  # a cast to uint8 is not vectorised and takes nine times as long
            pack(lanes, codec.bits, packed, spare)

    def _measure(
        self,
        x: torch.Tensor,
        y: torch.Tensor,
        scale: torch.Tensor,
        sign: torch.Tensor,
        high: torch.Tensor,
        low: torch.Tensor,
        less: torch.Tensor,
    ) -> float:
        """Write each block's scale to ``scale``, and return the number of codes per scale. The other tensors are spare."""
        codec = self.codec
        if not codec.centred and codec.rounding == "nearest":
            torch.mul(x, 1.0 / codec.block, out=y).abs_()  # divide first: the sum may overflow although the mean fits
            torch.sum(y, 1, keepdim=True, out=scale)
            if codec.bits == 2:
                scale.mul_(TWO_BITS)
            return 0.5
        # Two passes that only read. A norm, aminmax, or the largest magnitude take longer.
        torch.amax(x, 1, keepdim=True, out=high)
        torch.amin(x, 1, keepdim=True, out=low).neg_()
        if not codec.lopsided:
            # Triton's scale of a block of zeros has no sign either.
            torch.maximum(high, low, out=scale).abs_().mul_(1.0 / self._reach())
            return 1.0 if codec.centred else 0.5
        farther, other = codec.shares
        torch.ge(low, high, out=sign).sub_(0.5)  # their difference would be NaN with Inf on both sides
        torch.minimum(high, low, out=less).mul_(other)
        torch.maximum(high, low, out=scale).mul_(farther)
        torch.copysign(torch.maximum(scale, less, out=scale), sign, out=scale)
        return 1.0

    def _reach(self) -> float:
        """Return the largest number of a block in scales."""
        codec = self.codec
        if not codec.centred:
            return (1 << codec.bits) - 1
        return (1 << (codec.bits - 1)) - 1

    def decoded(self, rows: int, scales: torch.Tensor) -> torch.Tensor:
        """Return the numbers of the last :meth:`encode` as peers decode them, ``(rows, block)`` fp32, in ``y``."""
        return self._levels(rows).mul_(self._of(rows).of_blocks[0].copy_(scales))

    def subtract(self, x: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """Subtract from ``x`` what peers decode of the last :meth:`encode`, instead of :meth:`decoded`."""
        # A product of code and scale has at most 16 bits. It is exact, so it rounds as the product that peers add.
        return x.addcmul_(self._levels(len(x)), self._of(len(x)).of_blocks[0].copy_(scales), value=-1.0)

    def _levels(self, rows: int) -> torch.Tensor:
        """Return the codes of the last :meth:`encode` as multiples of the scale, ``(rows, block)`` fp32, in ``y``."""
        y = self._of(rows).y
        return y if self.codec.centred else y.mul_(2.0).add_(1.0)

    def decode(
        self,
        scales: torch.Tensor,
        packed: torch.Tensor,
        out: torch.Tensor | None = None,
        factor: float = 1.0,
        add: bool = False,
    ) -> torch.Tensor:
        """Return ``factor`` times the numbers of a chunk, ``(rows, block)`` fp32, in ``out`` or in ``y``.

        Args:
            scales: from :meth:`Codec.split`.
            packed: likewise.
            out: receives the numbers; ``None`` stands for ``y``.
            factor: multiplies each scale.
            add: True to add the numbers to ``out``.
        """
        codec, (y, codes, lanes, _, of_blocks) = self.codec, self._of(len(scales))
        if out is not None and not add:
            y = out
        if codec.bits == 8:
            codes = packed.view(y.shape)
        else:
            unpack(packed, codec.bits, lanes)
        if not codec.centred:
            codes.mul_(2).add_(1)  # of half a step each
        scale = of_blocks[0].copy_(scales)
        if factor != 1.0:
            scale.mul_(factor)
        y.copy_(codes)
        if out is None or not add:
            return y.mul_(scale)
        # A code times a scale has at most 16 bits, also with a power of two. The product is exact, so that it makes no difference
        # if a build rounds it before it adds. Other factors need two operations, or builds would differ in the last bit.
        return out.addcmul_(y, scale) if math.frexp(factor)[0] == 0.5 else out.add_(y.mul_(scale))


@cache
def _by(number: int) -> torch.Tensor:
    """Return a shift or mask as a tensor. Torch would convert and cast a plain number at every call."""
    return torch.tensor(number, dtype=torch.int8, device="cpu")


def packed_bytes(numel: int, bits: int) -> int:
    """Return the bytes of ``numel`` codes, a multiple of 16."""
    return numel * bits // 8


def in_lanes(codes: torch.Tensor, bits: int) -> tuple[torch.Tensor, ...]:
    """Return views of the lanes of ``codes``, 1-D, its length a multiple of 16."""
    return codes.view(8 // bits, -1).unbind()


def pack(lanes: Sequence[torch.Tensor], bits: int, out: torch.Tensor, spare: torch.Tensor) -> None:
    """Pack the low ``bits`` of every code into ``out``.

    Args:
        lanes: codes, int8, from :func:`in_lanes`.
        bits: 8, 4, 2 or 1.
        out: ``(n * bits / 8,)`` int8, for ``n`` codes.
        spare: int8, as long as a lane, overwritten.

    Example:
        >>> import torch
        >>> codes = torch.tensor([1, -1] * 8, dtype=torch.int8)
        >>> out, spare = torch.empty(8, dtype=torch.int8), torch.empty(8, dtype=torch.int8)
        >>> pack(in_lanes(codes, 4), 4, out, spare)
        >>> out[:2].tolist()  # codes 0 and 8, codes 1 and 9
        [17, -1]
    """
    last, mask = len(lanes) - 1, (1 << bits) - 1
    torch.bitwise_left_shift(lanes[last], _by(bits * last), out=out)  # bits above the code leave the byte
    for k in range(last - 1, -1, -1):
        torch.bitwise_and(lanes[k], _by(mask), out=spare)
        if k:
            spare.bitwise_left_shift_(_by(bits * k))
        out.bitwise_or_(spare)


def unpack(packed: torch.Tensor, bits: int, lanes: Sequence[torch.Tensor]) -> None:
    """Unpack the codes of :func:`pack`, int8 from ``-2 ** (bits - 1)``, into ``lanes``.

    Example:
        >>> import torch
        >>> codes = torch.empty(16, dtype=torch.int8)
        >>> unpack(torch.full((8,), 17, dtype=torch.int8), 4, in_lanes(codes, 4))
        >>> codes.unique().tolist()
        [1]
    """
    for k, lane in enumerate(lanes):
        left = 8 - bits * (k + 1)
        source = torch.bitwise_left_shift(packed, _by(left), out=lane) if left else packed
        torch.bitwise_right_shift(source, _by(8 - bits), out=lane)
