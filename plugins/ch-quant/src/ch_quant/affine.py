"""Affine uint8 quantization and an all-gather, as in PyTorch's ``quantization_*_hook``.

A row of ``n`` elements has a scale ``s = (max - min) / 255`` and a zero point ``z = round(-min / s)``, the range
widened to hold zero. An element travels as ``q = clamp(round(x / s) + z, 0, 255)`` and arrives as ``(q - z) s``. Every
rank gathers every rank's bytes and averages them in rank order, so all ranks have the same bits. It receives (W - 1) bytes
per element, so prefer ``quant8`` beyond two ranks.

A row is a parameter, or ``bucket_size`` elements of a parameter, so results do not depend on the buckets. The last row
of a parameter may be shorter. A bias does not share the scale of a weight.

On the wire, one message per bucket: fp32 scales of all rows, their zero points, the codes. A row that is not finite
has a scale of NaN, and arrives as NaN.
"""

from collections.abc import Iterator
from typing import Any

import torch

from commhooks import AllGather, Bucket, BucketLayout, HookConfigError, Reduction, Stages, StepContext, per_layout

LEVELS = 255
SMALLEST = 1.2e-38  # a scale that division survives


class AffineGather(Reduction):
    """All-gather of the bucket as affine uint8.

    Args:
        bucket_size: elements that share a scale; ``None`` gives each parameter one scale.
        name: shown in tables.

    Raises:
        HookConfigError: ``bucket_size`` is not positive.

    Example:
        >>> layout = BucketLayout.of_shapes({"w": (1024,), "b": (10,)})
        >>> stages = AffineGather(512).plan(layout, StepContext(world_size=2))
        >>> stages[0][0].payload_bytes  # of two ranks: three scales and zero points, 1034 codes
        2098
    """

    granularity = "tensor"
    collectives = frozenset({"all_gather"})
    lossy = True

    def __init__(self, bucket_size: int | None = None, name: str = "affine_gather") -> None:
        if bucket_size is not None and (isinstance(bucket_size, bool) or bucket_size < 1):
            raise HookConfigError(f"bucket_size={bucket_size!r}: expected a positive number of elements")
        self.bucket_size, self.name = bucket_size, name

    def config(self) -> dict[str, Any]:
        return {} if self.bucket_size is None else {"bucket_size": self.bucket_size}

    def run(self, bucket: Bucket, ctx: StepContext) -> Stages:
        rows = self._rows_of(bucket.layout)
        total = ctx.scratch("total", (rows.numel,), device=bucket.device).copy_(bucket.buffer)
        message = ctx.scratch("message", (rows.bytes,), torch.uint8, bucket.device)
        everyone = ctx.scratch("everyone", (ctx.world_size, rows.bytes), torch.uint8, bucket.device)

        for x, parts in rows.pieces(total, message):
            encode(x, *parts)
        yield AllGather(message, everyone.view(-1))

        total.zero_()
        for one in everyone:  # in rank order, so that every rank gets the same sum
            for x, parts in rows.pieces(total, message.copy_(one)):  # a row of `everyone` may not be aligned for fp32
                # A sum may overflow although the mean fits. With alpha= some builds would add before they round the product.
                x.add_(decode(*parts).mul_(1.0 / ctx.world_size))
        bucket.buffer = total.to(bucket.dtype)

    @per_layout
    def _rows_of(self, layout: BucketLayout) -> "Rows":
        return Rows([p.numel for p in sorted(layout.params, key=lambda p: p.offset)], self.bucket_size)


class Rows:
    """Layout of the rows of a bucket in its buffer and in a message."""

    def __init__(self, numels: list[int], columns: int | None) -> None:
        self.numel = sum(numels)
        self.shapes: list[tuple[int, int]] = []  # (rows, columns), one after another
        for n in numels:
            width = columns or n
            whole, rest = divmod(n, width)
            self.shapes += [(whole, width)] * (whole > 0) + [(1, rest)] * (rest > 0)
        self.count = sum(rows for rows, _ in self.shapes)
        self.bytes = 5 * self.count + self.numel

    def pieces(
        self, flat: torch.Tensor, message: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]]:
        """Yield live views: elements ``(rows, columns)``; scales and zero points ``(rows, 1)``, codes like the elements."""
        scales = message[: 4 * self.count].view(torch.float32)
        zeros = message[4 * self.count : 5 * self.count]
        codes = message[5 * self.count : 5 * self.count + self.numel]
        row = element = 0
        for rows, columns in self.shapes:
            here, there = slice(row, row + rows), slice(element, element + rows * columns)
            parts = scales[here].view(rows, 1), zeros[here].view(rows, 1), codes[there].view(rows, columns)
            yield flat[there].view(rows, columns), parts
            row, element = here.stop, there.stop


def encode(x: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, codes: torch.Tensor) -> None:
    """Fill a message's parts from ``x``, ``(rows, columns)`` fp32, and overwrite ``x``."""
    low, high = torch.aminmax(x, dim=1, keepdim=True)
    low, high = low.clamp(max=0.0), high.clamp(min=0.0)
    # In halves, so that no finite range overflows. A row with NaN or Inf gets NaN here, and so in all numbers.
    scale = ((high / LEVELS) - (low / LEVELS)).clamp_(min=SMALLEST)
    scales.copy_(torch.where(scale.isfinite(), scale, torch.full_like(scale, float("nan"))))
    zero = (-low / scale).round_().nan_to_num_(0.0).clamp_(0, LEVELS)
    zeros.copy_(zero)
    codes.copy_(x.div_(scale).round_().add_(zero).nan_to_num_(0.0).clamp_(0, LEVELS))


def decode(scales: torch.Tensor, zeros: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """Return the numbers of a message's parts, ``(rows, columns)`` fp32."""
    return (codes.float() - zeros.float()).mul_(scales)


def quantize_per_tensor() -> AffineGather:
    """Return a hook with one scale for each parameter."""
    return AffineGather(None, "quantize_per_tensor")


def quantize_per_channel(bucket_size: int = 512) -> AffineGather:
    """Return a hook with a scale for every ``bucket_size`` elements of a parameter."""
    return AffineGather(bucket_size, "quantize_per_channel")
