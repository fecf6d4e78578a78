"""Affine uint8 quantization and an all-gather: what PyTorch's ``quantization_*_hook`` do.

A row of the bucket has a scale ``s = (max - min) / 255`` and a zero point ``z = round(-min / s)``, the range widened
to hold zero; an element travels as ``q = clamp(round(x / s) + z, 0, 255)`` and arrives as ``(q - z) s``. Every rank
gathers every rank's bytes and averages them in rank order, so all have the same bits, and receives (W - 1) bytes per
element: use ``quant8`` beyond two ranks.

On the wire, one message per bucket: ``rows`` fp32 scales, ``rows`` zero points, the codes, zeros up to a multiple of
four bytes. A row that is not finite has a scale of NaN, and arrives as NaN.
"""

from typing import Any

import torch

from commhooks import AllGather, Bucket, HookConfigError, Reduction, Stages, StepContext

LEVELS = 255
SMALLEST = 1.2e-38  # a scale that division survives


class AffineGather(Reduction):
    """All-gather of the bucket as affine uint8.

    Args:
        bucket_size: elements that share a scale; ``None`` gives the bucket one scale.
        name: shown in tables.

    Raises:
        HookConfigError: ``bucket_size`` is not positive.

    Example:
        >>> from commhooks import BucketLayout
        >>> layout = BucketLayout.of_shapes({"w": (1024,)})
        >>> AffineGather(512).plan(layout, StepContext(world_size=2))[0][0].payload_bytes  # 2 * (2 * 5 + 1024 + 2)
        2072
    """

    granularity = "bucket"
    collectives = frozenset({"all_gather"})
    lossy = True

    def __init__(self, bucket_size: int | None = None, name: str = "affine_gather") -> None:
        if bucket_size is not None and (isinstance(bucket_size, bool) or bucket_size < 1):
            raise HookConfigError(f"bucket_size={bucket_size!r}: expected a positive number of elements")
        self.bucket_size, self.name = bucket_size, name

    def config(self) -> dict[str, Any]:
        return {} if self.bucket_size is None else {"bucket_size": self.bucket_size}

    def run(self, bucket: Bucket, ctx: StepContext) -> Stages:
        flat = bucket.buffer
        numel, columns = flat.numel(), self.bucket_size or flat.numel()
        rows = -(-numel // columns)
        size = -(-(rows * (5 + columns)) // 4) * 4
        payload = ctx.scratch("payload", (size,), torch.uint8, flat.device)
        everyone = ctx.scratch("everyone", (ctx.world_size, size), torch.uint8, flat.device)

        padded = ctx.scratch("rows", (rows * columns,), device=flat.device)
        padded[:numel].copy_(flat)
        padded[numel:].zero_()
        encode(padded.view(rows, columns), payload)
        yield AllGather(payload, everyone.view(-1))

        padded.zero_()
        for message in everyone:  # rank order: every rank makes the same sum
            padded.add_(decode(message, rows, columns).view(-1))
        bucket.buffer = padded[:numel].mul_(1.0 / ctx.world_size).to(flat.dtype)


def parts(payload: torch.Tensor, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Views of a message: scales ``(rows, 1)`` fp32, zero points ``(rows, 1)``, codes ``(rows, columns)``."""
    scales = payload[: 4 * rows].view(torch.float32).view(rows, 1)
    zeros = payload[4 * rows : 5 * rows].view(rows, 1)
    return scales, zeros, payload[5 * rows : rows * (5 + columns)].view(rows, columns)


def encode(x: torch.Tensor, payload: torch.Tensor) -> None:
    """Fill a message from ``x`` ``(rows, columns)`` fp32, which is overwritten."""
    scales, zeros, codes = parts(payload, *x.shape)
    low, high = (edge.view(-1, 1) for edge in torch.aminmax(x, dim=1))
    low, high = low.clamp(max=0.0), high.clamp(min=0.0)
    # In halves, so that no finite range overflows; a row with NaN or inf has a NaN here, and so everywhere.
    scale = ((high / LEVELS) - (low / LEVELS)).clamp_(min=SMALLEST)
    scales.copy_(torch.where(scale.isfinite(), scale, torch.full_like(scale, float("nan"))))
    zero = (-low / scale).round_().nan_to_num_(0.0).clamp_(0, LEVELS)
    zeros.copy_(zero)
    codes.copy_(x.div_(scale).round_().add_(zero).nan_to_num_(0.0).clamp_(0, LEVELS))
    payload[5 * x.shape[0] + x.numel() :].zero_()


def decode(payload: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """``(rows, columns)`` fp32 from a message."""
    scales, zeros, codes = parts(payload, rows, columns)
    return (codes.float() - zeros.float()).mul_(scales)


def quantize_per_tensor() -> AffineGather:
    """One scale for the whole bucket."""
    return AffineGather(None, "quantize_per_tensor")


def quantize_per_channel(bucket_size: int = 512) -> AffineGather:
    """A scale for every ``bucket_size`` elements of the bucket."""
    return AffineGather(bucket_size, "quantize_per_channel")
