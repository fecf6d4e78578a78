"""Numbers made ready for the wire: scaled before they are cast, rounded to the nearest or at random."""

import torch

from commhooks.requests import Wire

# Elements of fp32: few enough to stay in a CPU's cache between two passes, many enough for a call each.
_BLOCK = 1 << 19


def encode(source: torch.Tensor, target: torch.Tensor, scale: float, wire: Wire | None) -> None:
    """``target = round(scale * source)`` in one pass: the scaling happens before the cast, so no value overflows
    16 bits whose average does not.
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
    """``target = round(scale * source)`` on a CPU, where ``torch.mul`` into another dtype takes twice as long as a
    product and a cast that find each other in the cache.
    """
    scaled = torch.empty(min(_BLOCK, source.numel()), dtype=source.dtype, device=source.device)
    for part, out in zip(source.split(_BLOCK), target.split(_BLOCK), strict=True):
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
