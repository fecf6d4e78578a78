"""What parameters and gradients hold, by a few of their numbers."""

import torch

from commhooks.bucket import dense

_SAMPLE = 64  # numbers of a tensor that are looked at


class Image:
    """A few numbers of each parameter, as they were, bit for bit.

    Not version counters: ``.data`` passes them by, and a broadcast of what is there already (``DDP.join`` ends with
    one) counts as a change. No evidence once an optimizer steps: what else changes parameters then (clipping them, a
    new start of some) uses no gradients.
    """

    def __init__(self, params: list[torch.Tensor]) -> None:
        self._params = params
        self._addresses: list[int] = []
        self._bits: list[torch.Tensor] = []

    @torch.no_grad()
    def take(self) -> None:
        self._addresses, self._bits = self._now()

    @torch.no_grad()
    def differs(self) -> bool:
        addresses, bits = self._now()
        return addresses != self._addresses or not all(map(torch.equal, bits, self._bits))

    def _now(self) -> tuple[list[int], list[torch.Tensor]]:
        """Addresses, and the samples of all parameters of a device as one tensor of bytes."""
        local = [_local(p).detach() for p in self._params]
        by_device: dict[torch.device, list[torch.Tensor]] = {}
        for tensor in local:
            by_device.setdefault(tensor.device, []).append(_sample(tensor).view(torch.uint8))
        return [tensor.data_ptr() for tensor in local], [torch.cat(samples) for samples in by_device.values()]


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """A view of a few numbers in the middle of where a tensor lies in memory."""
    if not dense(tensor):
        return tensor.new_empty(0)
    count = min(tensor.numel(), _SAMPLE)
    return tensor.as_strided((count,), (1,), tensor.storage_offset() + (tensor.numel() - count) // 2)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a DTensor; another tensor itself."""
    found: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return found


@torch.no_grad()
def hold_numbers(params: list[torch.Tensor]) -> bool:
    """Whether a gradient is not zero. Mostly a few numbers of the first one tell; on CUDA the host waits for them."""
    gradients = (_dense_part(p.grad) for p in params if p.grad is not None)  # no further than needed
    if any(bool(_sample(gradient).any()) for gradient in gradients):
        return True
    return any(bool(_dense_part(p.grad).any()) for p in params if p.grad is not None)


def _dense_part(gradient: torch.Tensor) -> torch.Tensor:
    gradient = _local(gradient)
    return gradient._values() if gradient.is_sparse else gradient
