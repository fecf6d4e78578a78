"""Numbers of a device on their way to the host."""

import torch


class HostCopy:
    """A few numbers, copied as they are now, that the host reads later: it then waits for what was started before the copy,
    never for what came after. ``.item()`` waits for everything.

    Args:
        tensor: of any device; may change afterwards.

    Example:
        >>> number = torch.tensor([3.0])
        >>> copy = HostCopy(number)
        >>> _ = number.zero_()
        >>> copy.values()
        [3.0]
    """

    __slots__ = ("_event", "_host")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if not tensor.is_cuda:
            self._host = tensor.detach().clone()
            return
        # In the tensor's own dtype, on the host: the user's defaults may be others. torch keeps pinned memory for reuse.
        self._host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
        self._host.copy_(tensor, non_blocking=True)
        self._event = torch.cuda.Event()
        self._event.record()

    def values(self) -> list[float]:
        """All numbers, flat."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        return list(map(float, self._host.flatten().tolist()))
