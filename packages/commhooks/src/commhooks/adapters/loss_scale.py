"""Reads the loss scale of a ``GradScaler``."""

import torch

from ch_core import HostCopy
from commhooks.adapters.options import Scaler


class LossScale:
    """Reads the scale of a ``GradScaler`` without delaying a GPU.

    Args:
        scaler: a ``GradScaler``, or ``None`` for a scale of 1.
    """

    def __init__(self, scaler: Scaler | None) -> None:
        self._scaler = scaler
        self._copy: HostCopy | None = None
        self._copied: tuple[int, int] | None = None  # identity and version of the tensor that was copied

    def read(self) -> float:
        """Return the scale of the step that begins.

        On a GPU the host waits for work from before the forward only. If the scale has changed since :meth:`prefetch`, as in
        the first step, the host waits for all work.
        """
        if self._scaler is None or not self._scaler.is_enabled():
            return 1.0
        tensor = self._tensor()
        if tensor is not None and self._copy is not None and self._copied == (id(tensor), tensor._version):
            return self._copy.values()[0]
        return float(self._scaler.get_scale())

    def prefetch(self) -> None:
        """Copy the scale to the host. The forward begins, so the scaler has updated it, and the queue is short."""
        tensor = self._tensor()
        if tensor is not None and self._copied != (id(tensor), tensor._version):
            self._copied, self._copy = (id(tensor), tensor._version), HostCopy(tensor)

    def _tensor(self) -> torch.Tensor | None:
        # A GradScaler shows its tensor by no public name. Without the tensor, get_scale() waits for all work of a GPU.
        found = getattr(self._scaler, "_scale", None)
        return found if isinstance(found, torch.Tensor) else None
