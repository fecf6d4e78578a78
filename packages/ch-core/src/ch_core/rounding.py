"""Scales numbers and rounds them for the wire."""

import torch

from ch_core.sizes import SIZES


def encode(source: torch.Tensor, target: torch.Tensor, scale: float) -> None:
    """Write ``round(scale * source)`` to ``target``.

    The scaling comes before the cast. Without that, a number could overflow 16 bits although the average does not.

    Args:
        source: floating-point numbers.
        target: same number of elements, of the dtype on the wire.
        scale: factor, such as ``1 / world_size``.
    """
    if scale != 1.0 and source.dtype != target.dtype and source.device.type == "cpu":
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
