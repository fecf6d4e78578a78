"""Units of a state's entries: the loss scale of the gradients that they were made from, and their device."""

from collections.abc import Mapping

import torch

from ch_core.entries import RESIDUAL, Versions


class Units:
    """Loss scale and device of a state's entries.

    Args:
        versions: the entries.

    Attributes:
        scale: loss scale of the gradients that the fields of :attr:`scaled` were made from.
        scaled: power of the loss scale in each field that follows it: 1 for gradients, 2 for their squares.
    """

    def __init__(self, versions: Versions) -> None:
        self._versions = versions
        self.scale = 1.0
        self.scaled: Mapping[str, int] = {RESIDUAL: 1}
        self.forget_device()

    def forget_device(self) -> None:
        """Look at the entries at the next :meth:`bring`. A load may put them anywhere, by ``map_location``."""
        self._device: torch.device | None = None

    def bring(self, device: torch.device) -> None:
        """Move all entries to the device of the gradients."""
        if self._device != device:
            for _, entry in self._versions.every():
                entry.to(device)
            self._device = device

    def rescale(self, scale: float) -> None:
        """Convert the fields of :attr:`scaled` to another loss scale.

        Raises:
            ValueError: ``scale`` is not a positive finite number.
        """
        if scale == self.scale:
            return
        if not 0.0 < scale < float("inf"):
            raise ValueError(f"the loss scale is {scale}; expected a positive finite number")
        for (_, field), entry in self._versions.every():
            power, tensor = self.scaled.get(field), entry.tensors[-1]  # codes follow through their scales
            if power and tensor.is_floating_point():
                tensor.mul_((scale / self.scale) ** power)
        self.scale = scale

    def unscaled(self, field: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return numbers of a field without the loss scale."""
        return tensor / self.scale ** self.scaled[field] if field in self.scaled and self.scale != 1.0 else tensor
