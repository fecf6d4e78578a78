"""One file of device-specific code serves every accelerator that torch has a module for."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from ch_core.device import HostCopy, SideStream, device_of_backend, is_asynchronous, is_capturing


class Tensor:
    """Stands for a tensor on an accelerator that this machine lacks."""

    is_cpu, shape, dtype = False, (1,), torch.float32

    def __init__(self, kind: str, index: int = 0) -> None:
        self.device = torch.device(kind, index)
        self.recorded: list[Any] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0]  # a copy from this device

    def record_stream(self, stream: Any) -> None:
        self.recorded.append(stream)


class Module:
    """The parts of ``torch.cuda``, ``torch.xpu`` and others that the engine uses. Device 0 is current."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.current = 0
        module = self

        class Event:
            def record(self, stream: Any = None) -> None:
                module.log.append(f"records on {(stream or module.current_stream()).device}")

        class Stream:
            def __init__(self, device: torch.device) -> None:
                self.device = device
                module.log.append(f"stream of {device.type}")

            def wait_stream(self, other: Any) -> None:
                module.log.append("waits")

        self.Stream, self.Event = Stream, Event

    def current_stream(self, device: torch.device | None = None) -> Any:
        stream = object.__new__(self.Stream)
        stream.device = device if device is not None else torch.device("cuda", self.current)
        return stream

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        before, self.current = self.current, device.index
        yield
        self.current = before

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        self.log.append("enters")
        yield
        self.log.append("leaves")

    def is_current_stream_capturing(self) -> bool:
        return self.current == 1


@pytest.mark.parametrize("kind", ["cuda", "xpu", "mtia"])
def test_any_module_of_torch_provides_the_side_stream(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, tensor, side = Module(), Tensor(kind), SideStream()
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    module.log.clear()
    for _ in range(2):
        with side.on(tensor):  # type: ignore[arg-type]
            module.log.append("works")
    assert module.log == [f"stream of {kind}", *(["waits", "enters", "works", "leaves"] * 2)]
    assert len(tensor.recorded) == 2
    side.join(tensor)  # type: ignore[arg-type]
    assert module.log[-1] == "waits"
    assert is_asynchronous(tensor.device)


def test_a_stream_is_of_the_tensors_device_and_not_of_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model on ``cuda:1`` does not make it the current device."""
    module, tensor = Module(), Tensor("cuda", 1)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    monkeypatch.setattr(torch, "empty", lambda shape, dtype, device, pin_memory: torch.zeros(shape, dtype=dtype))
    HostCopy(tensor)  # type: ignore[arg-type]
    assert module.log == ["records on cuda:1"]
    assert [is_capturing(torch.device("cuda", index)) for index in range(2)] == [False, True]
    assert module.current == 0


def test_a_device_with_one_queue_has_no_side_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_device_module", lambda device: object())
    tensor, side = Tensor("mps"), SideStream()
    with side.on(tensor):  # type: ignore[arg-type]
        pass
    side.join(tensor)  # type: ignore[arg-type]
    assert not tensor.recorded
    assert not is_capturing(tensor.device)


def test_on_a_cpu_nothing_waits() -> None:
    number = torch.arange(3.0)
    with SideStream().on(number):
        copy = HostCopy(number)
    number.zero_()
    assert copy.arrived()
    assert copy.values() == [0.0, 1.0, 2.0]
    assert not is_asynchronous(number.device)
    assert not is_capturing(number.device)


def test_backends_of_accelerators_need_one() -> None:
    assert device_of_backend("gloo") == torch.device("cpu")
    if not torch.accelerator.is_available():
        with pytest.raises(RuntimeError, match="backend 'nccl' carries tensors of an accelerator"):
            device_of_backend("nccl")


def test_a_cuda_build_without_a_device_has_no_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a build names CUDA as its accelerator, and raises an error of its own for the index of the device."""
    monkeypatch.setattr(torch._C, "_accelerator_getAccelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert torch.accelerator.current_accelerator() == torch.device("cuda")
    with pytest.raises(RuntimeError, match="backend 'nccl' carries tensors of an accelerator"):
        device_of_backend("nccl")
