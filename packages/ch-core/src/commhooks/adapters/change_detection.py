"""Detects changed parameters and nonzero gradients by sampling a few elements of each tensor."""

import torch

from commhooks.bucket import dense

_SAMPLE = 64  # elements of a tensor that are compared


class ParameterSnapshot:
    """The address and a few elements of each parameter, bit for bit.

    Version counters would not do. Writes through ``.data`` do not count, and a broadcast of equal numbers does, with which
    ``DDP.join`` ends. The snapshot is no evidence once an optimizer steps. Other changes, such as clipped or reset
    parameters, then use no gradients.
    """

    def __init__(self, params: list[torch.Tensor]) -> None:
        self._params = params
        self._addresses: list[int] = []
        self._samples: list[torch.Tensor] = []

    @torch.no_grad()
    def take(self) -> None:
        """Store the present parameters."""
        self._addresses, self._samples = self._now()

    @torch.no_grad()
    def differs(self) -> bool:
        """True if a parameter has changed since :meth:`take`."""
        addresses, samples = self._now()
        return addresses != self._addresses or not all(map(torch.equal, samples, self._samples))

    def _now(self) -> tuple[list[int], list[torch.Tensor]]:
        """Return all addresses, and for each device one uint8 tensor with the samples of its parameters."""
        local = [_local(p).detach() for p in self._params]
        by_device: dict[torch.device, list[torch.Tensor]] = {}
        for tensor in local:
            by_device.setdefault(tensor.device, []).append(_sample(tensor).view(torch.uint8))
        return [tensor.data_ptr() for tensor in local], [torch.cat(samples) for samples in by_device.values()]


@torch.no_grad()
def any_nonzero_gradient(params: list[torch.Tensor]) -> bool:
    """True if a gradient has a nonzero element. Usually a sample of the first one decides. On a GPU the host waits for it."""
    gradients = (_dense_part(p.grad) for p in params if p.grad is not None)
    if any(bool(_sample(gradient).any()) for gradient in gradients):
        return True
    return any(bool(_dense_part(p.grad).any()) for p in params if p.grad is not None)


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of at most 64 elements from the middle of the tensor's memory; empty if its memory has gaps."""
    if not dense(tensor):
        return tensor.new_empty(0)
    count = min(tensor.numel(), _SAMPLE)
    return tensor.as_strided((count,), (1,), tensor.storage_offset() + (tensor.numel() - count) // 2)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a DTensor, or the tensor itself."""
    found: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return found


def _dense_part(gradient: torch.Tensor) -> torch.Tensor:
    gradient = _local(gradient)
    return gradient._values() if gradient.is_sparse else gradient
