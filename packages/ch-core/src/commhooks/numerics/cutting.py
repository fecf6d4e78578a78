"""Many tensors in one flat tensor."""

import math
from collections.abc import Sequence

import torch


def cut(flat: torch.Tensor, shapes: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Views of these shapes, one after another; what ``flat`` holds beyond them is in none.

    Args:
        flat: 1-D, contiguous, of at least as many elements as the shapes have together.
        shapes: of the views.

    Raises:
        RuntimeError: ``flat`` is too short.

    Example:
        >>> import torch
        >>> [part.tolist() for part in cut(torch.arange(6), [(2, 2), (1,)])]
        [[[0, 1], [2, 3]], [4]]
    """
    sizes = [math.prod(shape) for shape in shapes]
    parts = flat.split_with_sizes([*sizes, flat.numel() - sum(sizes)])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=False)]
