"""Detects changed parameters and nonzero gradients by sampling a few elements of each tensor."""

from collections.abc import Callable, Iterable

import torch

from ch_core import SIZES, dense


class ParameterSnapshot:
    """The address and a few elements of each parameter, bit for bit.

    Version counters would not do. Writes through ``.data`` do not count, and a broadcast of equal numbers does, with which
    ``DDP.join`` ends. The snapshot proves nothing once an optimizer steps. Other changes, such as clipped or reset
    parameters, then use no gradients.

    Args:
        params: returns the present parameters, trainable and frozen.
    """

    def __init__(self, params: Callable[[], Iterable[torch.Tensor]]) -> None:
        self._params = params
        self._taken: list[torch.Tensor] = []
        self._addresses: list[int] = []
        self._samples: list[torch.Tensor] = []

    @torch.no_grad()
    def take(self) -> None:
        """Store the present parameters, also frozen ones, which the user may thaw before :meth:`differs`."""
        self._taken = list(self._params())
        local = [_local(p).detach() for p in self._taken]
        self._addresses = [tensor.data_ptr() for tensor in local]
        self._samples = _copies([_sample_bytes(tensor) for tensor in local])

    @torch.no_grad()
    def differs(self) -> bool:
        """True if a parameter that is trainable now has changed since :meth:`take`."""
        before: dict[torch.device, list[torch.Tensor]] = {}
        now: dict[torch.device, list[torch.Tensor]] = {}
        for param, address, sample in zip(self._taken, self._addresses, self._samples, strict=True):
            if not param.requires_grad:
                continue
            local = _local(param).detach()
            if local.data_ptr() != address:
                return True
            before.setdefault(sample.device, []).append(sample)
            now.setdefault(sample.device, []).append(_sample_bytes(local))
        # One comparison for each device, because on a GPU the host waits for each.
        return not all(torch.equal(torch.cat(now[device]), torch.cat(before[device])) for device in now)


@torch.no_grad()
def any_nonzero_gradient(params: list[torch.Tensor]) -> bool:
    """True if a gradient has a nonzero element. Usually a sample of the first one decides. On a GPU the host waits for it."""
    gradients = (_dense_part(p.grad) for p in params if p.grad is not None)
    if any(bool(_sample(gradient).any()) for gradient in gradients):
        return True
    return any(bool(_dense_part(p.grad).any()) for p in params if p.grad is not None)


@torch.no_grad()
def finite_gradients(params: list[torch.Tensor]) -> bool:
    """True if all elements of all gradients are finite. On a GPU the host waits for it."""
    return all(bool(_dense_part(p.grad).isfinite().all()) for p in params if p.grad is not None)


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of a few elements from the middle of the tensor's memory; empty if its memory has gaps."""
    if not dense(tensor):
        return tensor.new_empty(0)
    count = min(tensor.numel(), SIZES.sample_elements)
    return tensor.as_strided((count,), (1,), tensor.storage_offset() + (tensor.numel() - count) // 2)


def _sample_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return _sample(tensor).view(torch.uint8)


def _copies(samples: list[torch.Tensor]) -> list[torch.Tensor]:
    """Copy vectors, with one kernel for each device."""
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for sample in samples:
        by_device.setdefault(sample.device, []).append(sample)
    copies = {d: iter(torch.cat(some).split([len(s) for s in some])) for d, some in by_device.items()}
    return [next(copies[sample.device]) for sample in samples]


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a DTensor, or the tensor itself."""
    found: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return found


def _dense_part(gradient: torch.Tensor) -> torch.Tensor:
    gradient = _local(gradient)
    return gradient._values() if gradient.is_sparse else gradient
