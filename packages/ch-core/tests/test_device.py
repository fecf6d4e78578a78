"""One file of device-specific code serves every accelerator that torch has a module for."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from commhooks.device import HostCopy, SideStream, device_of_backend, is_asynchronous, is_capturing


class Tensor:
    """Stands for a tensor on an accelerator that this machine lacks."""

    is_cpu = False

    def __init__(self, kind: str) -> None:
        self.device = torch.device(kind, 0)
        self.recorded: list[Any] = []

    def record_stream(self, stream: Any) -> None:
        self.recorded.append(stream)


class Module:
    """The parts of ``torch.cuda``, ``torch.xpu`` and others that the engine uses."""

    def __init__(self) -> None:
        self.log: list[str] = []
        module = self

        class Stream:
            def __init__(self, device: torch.device) -> None:
                module.log.append(f"stream of {device.type}")

            def wait_stream(self, other: Any) -> None:
                module.log.append("waits")

        self.Stream = Stream
        self.here = Stream(torch.device("cpu"))

    def current_stream(self, device: torch.device) -> Any:
        return self.here

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        self.log.append("enters")
        yield
        self.log.append("leaves")

    def is_current_stream_capturing(self) -> bool:
        return True


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
    assert is_capturing(tensor.device)


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
