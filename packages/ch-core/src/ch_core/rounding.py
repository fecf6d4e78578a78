"""Rounds numbers for the wire: scales before the cast, to the nearest or at random."""

import torch

from ch_core.requests import Wire
from ch_core.sizes import SIZES


def encode(source: torch.Tensor, target: torch.Tensor, scale: float, wire: Wire | None) -> None:
    """Write ``round(scale * source)`` to ``target``.

    The scaling comes before the cast. Without that, a number could overflow 16 bits although the average does not.

    Args:
        source: floating-point numbers.
        target: same number of elements, of the dtype on the wire.
        scale: factor, such as ``1 / world_size``.
        wire: rounding; ``None`` rounds to the nearest.
    """
    if wire is not None and wire.rounding == "stochastic":
        stochastic_round(source * scale, target)
    elif scale != 1.0 and source.dtype != target.dtype and source.device.type == "cpu":
        _scale_and_cast(source.reshape(-1), target.view(-1), scale)
    elif scale != 1.0:
        torch.mul(source, scale, out=target)
    else:
        target.copy_(source)


def _scale_and_cast(source: torch.Tensor, target: torch.Tensor, scale: float) -> None:
    """Scale and cast block by block on a CPU. ``torch.mul`` into another dtype would take twice as long."""
    count = SIZES.cast_elements
    scaled = torch.empty(min(count, source.numel()), dtype=source.dtype, device=source.device)
    for part, out in zip(source.split(count), target.split(count), strict=True):
        out.copy_(torch.mul(part, scale, out=scaled[: part.numel()]))


def stochastic_round(source: torch.Tensor, target: torch.Tensor) -> None:
    """Round fp32 to bf16 or fp16, up or down at random so that the expectation is the source.

    A number beyond the largest finite one of ``target`` rounds to the nearest, so that an overflow arrives as infinity and a
    ``GradScaler`` sees it. NaN stays NaN, and zero keeps its sign.

    bf16 is the upper half of fp32. A uniform 16-bit integer added to the bits, which are then truncated, rounds up with
    exactly the right probability. fp16 draws between the two neighbouring values.
    """
    values = source.float()
    if target.dtype == torch.bfloat16:
        bits = values.view(torch.int32)
        noise = torch.randint(0, 1 << 16, bits.shape, dtype=torch.int32, device=bits.device)
        rounded = ((bits + noise) & -65536).view(torch.float32)
    else:
        near = values.to(target.dtype)
        over = near.float() > values
        down = torch.where(over, torch.nextafter(near, torch.full_like(near, float("-inf"))), near)
        up = torch.nextafter(down, torch.full_like(down, float("inf")))
        gap = up.float() - down.float()
        chance = torch.where(gap > 0, (values - down.float()) / gap, torch.zeros_like(values))
        rounded = torch.where(torch.rand_like(values) < chance, up, down).float()
    inside = values.abs() <= torch.finfo(target.dtype).max  # False for NaN
    target.copy_(torch.where(inside, rounded, values))
