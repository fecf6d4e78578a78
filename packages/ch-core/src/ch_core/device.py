"""Device-specific code of ch-core: streams, events, pinned copies, graph capture and precision of products.

No other module of ch-core names a kind of device. All of it goes through ``torch.get_device_module``, which returns
``torch.cuda``, ``torch.xpu``, ``torch.mps`` or the module of a vendor, and through ``torch.accelerator``. To support
another accelerator, make its module pass through this file.

CPU tests cannot detect a breach of these rules:

- The side stream waits for the hook's stream before any encoding and at each resume.
- The engine waits for collectives inside ``with side.on(tensor):`` only.
- Memory that a stream did not allocate is recorded on it (:func:`record_use`), or it could be reused too early.
- A stream is asked for by the device of the tensor. The current device may be another one.
- Futures are made for the device and completed under the side stream.
- Host code never reads numbers of the running step.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

_SYNCHRONOUS = frozenset({"cpu", "meta"})
_ACCELERATOR_BACKENDS = ("nccl", "xccl", "hccl")
_SAME_QUEUE = nullcontext()


def is_asynchronous(device: torch.device) -> bool:
    """True if the host only queues work for this device, so that reading a number makes the host wait.

    >>> is_asynchronous(torch.device("cpu")), is_asynchronous(torch.device("xpu"))
    (False, True)
    """
    return device.type not in _SYNCHRONOUS


def is_capturing(device: torch.device) -> bool:
    """True if the current stream of the device records a graph, such as a CUDA graph."""
    if not is_asynchronous(device):
        return False
    module = torch.get_device_module(device)
    if not hasattr(module, "is_current_stream_capturing"):
        return False
    with module.device(device):  # torch asks the stream of the current device, which may be another one
        return bool(module.is_current_stream_capturing())


def device_names() -> list[str]:
    """Return the name of each accelerator that this process sees."""
    if not torch.accelerator.is_available():
        return []
    module = torch.get_device_module()
    name = getattr(module, "get_device_name", lambda index: module.__name__)
    return [str(name(index)) for index in range(torch.accelerator.device_count())]


def device_of_backend(backend: str) -> torch.device:
    """Return the device whose tensors a backend of ``torch.distributed`` carries.

    NCCL and its counterparts carry tensors of the current accelerator only. The other backends carry the CPU's.
    """
    if not any(name in backend for name in _ACCELERATOR_BACKENDS):
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        raise RuntimeError(
            f"backend {backend!r} carries tensors of an accelerator, and torch finds none on this machine"
        )
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def product_settings(device: torch.device) -> tuple[Any, Any]:
    """Return torch's two settings for fp32 products. The first one applies to this device.

    The attribute ``fp32_precision`` of each is ``"none"``, ``"ieee"``, ``"tf32"`` or ``"bf16"``.
    """
    backends: Any = torch.backends
    cuda, mkldnn = backends.cuda.matmul, backends.mkldnn.matmul
    return (cuda, mkldnn) if device.type == "cuda" else (mkldnn, cuda)


def record_use(tensor: torch.Tensor) -> None:
    """Let the allocator reuse the memory of a tensor only after the work of the current stream.

    The allocator gives freed memory back to the stream that allocated it, and waits for that stream alone. Memory that lives
    from step to step may be used on other streams, for example if FSDP2 reduces some gradients on its own stream and the
    others at the end of the backward. Without this the backward would overwrite memory that the other stream still uses.
    """
    if tensor.is_cpu or tensor.device.type in _SYNCHRONOUS:
        return
    module: Any = torch.get_device_module(tensor.device)
    if hasattr(module, "Stream"):
        tensor.record_stream(module.current_stream(tensor.device))


class SideStream:
    """Runs blocks on a stream next to the current one, ordered after all work that the current stream has so far.

    On a CPU, and on devices with a single queue, it does nothing.
    """

    def __init__(self) -> None:
        self._streams: dict[torch.device, Any] = {}

    def on(self, tensor: torch.Tensor) -> AbstractContextManager[None]:
        """Return a block on the side stream of the tensor's device, which records the tensor there."""
        return _SAME_QUEUE if tensor.is_cpu else self._on(tensor)

    @contextmanager
    def _on(self, tensor: torch.Tensor) -> Iterator[None]:
        device = tensor.device
        module: Any = None if device.type in _SYNCHRONOUS else torch.get_device_module(device)
        if not hasattr(module, "Stream"):
            yield
            return
        side = self._streams.get(device)
        if side is None:
            side = self._streams[device] = module.Stream(device)
        side.wait_stream(module.current_stream(device))
        with module.stream(side):
            record_use(tensor)
            yield

    def join(self, tensor: torch.Tensor) -> None:
        """Make the current stream wait for all work that the side stream of the tensor's device has so far."""
        side = self._streams.get(tensor.device)
        if side is not None:
            torch.get_device_module(tensor.device).current_stream(tensor.device).wait_stream(side)


class HostCopy:
    """A copy of a few numbers on the host, which does not delay the device.

    The host waits for the copy and for earlier work of the stream only. ``.item()`` would wait for all queued work.

    Args:
        tensor: on any device, of any shape. It may change afterwards.

    Example:
        >>> number = torch.tensor([3.0])
        >>> copy = HostCopy(number)
        >>> _ = number.zero_()
        >>> copy.values()
        [3.0]
    """

    __slots__ = ("_event", "_host")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._event: Any = None
        if not is_asynchronous(tensor.device):
            self._host = tensor.detach().clone()
            return
        # Name dtype and device: the user's defaults may differ. torch caches pinned memory, so this allocates once.
        self._host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
        self._host.copy_(tensor, non_blocking=True)
        module: Any = torch.get_device_module(tensor.device)
        self._event = module.Event()
        # Without a stream, an event takes the current device's. The copy is on the stream of the tensor's device.
        streams = (module.current_stream(tensor.device),) if hasattr(module, "current_stream") else ()
        self._event.record(*streams)

    def arrived(self) -> bool:
        """True if the host can read the numbers without waiting."""
        return self._event is None or bool(self._event.query())

    def tensor(self) -> torch.Tensor:
        """Return the copy, on the CPU. Wait for it if it has not arrived."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        return self._host

    def values(self) -> list[float]:
        """Return all numbers, flat. Wait for the copy if it has not arrived."""
        return list(map(float, self.tensor().flatten().tolist()))
