"""Scratch tensors that live from step to step.

Fresh allocations cost page faults on every step; a pool keyed by live bucket and name costs them once. Two live
buckets never share a tensor, because their generators interleave.
"""

from collections.abc import Hashable, Sequence

import torch


class Scratch:
    """A pool of uninitialised tensors, keyed by owner and name.

    Example:
        >>> import torch
        >>> pool = Scratch()
        >>> a = pool.get(0, "p", (4, 2), torch.float32, torch.device("cpu"))
        >>> a is pool.get(0, "p", (4, 2), torch.float32, torch.device("cpu"))
        True
    """

    def __init__(self) -> None:
        self._tensors: dict[tuple[Hashable, str], torch.Tensor] = {}

    def get(
        self, owner: Hashable, name: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """The tensor of this owner and name; made anew when shape, dtype or device changed."""
        key = (owner, name)
        found = self._tensors.get(key)
        if found is None or found.shape != tuple(shape) or found.dtype != dtype or found.device != device:
            found = self._tensors[key] = torch.empty(tuple(shape), dtype=dtype, device=device)
        return found
