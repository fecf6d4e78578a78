"""Scratch tensors that live from step to step.

Fresh allocations would cost page faults in every step. The pool is keyed by bucket and name. Two buckets in flight never
share a tensor, because their generators interleave.
"""

from collections.abc import Hashable, Sequence

import torch

from ch_core.device import record_use


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
        """Return the tensor of this owner and name. A new shape, dtype or device replaces it."""
        key = (owner, name)
        found = self._tensors.get(key)
        if found is None or found.shape != tuple(shape) or found.dtype != dtype or found.device != device:
            found = self._tensors[key] = torch.empty(tuple(shape), dtype=dtype, device=device)
        elif not found.is_cpu:
            record_use(found)  # a bucket of another size may replace it while this stream uses it
        return found
