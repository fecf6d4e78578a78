"""Modes of torch in which a rank runs if its tensors are not on the CPU (:mod:`ch_testing.rank_device`).

:class:`DrawnOnCPU` lets tests draw from CPU generators. :class:`Imagined` finds, without a GPU, tensors that a GPU rank
would have on the wrong device. It cannot find tensors of other threads than the rank's first, tensors that
``torch.load(map_location="cpu")`` returns, and devices that torch's own code chooses.
"""

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors
from torch.utils.weak import WeakIdKeyDictionary

CPU = torch.device("cpu")
IMAGINED = torch.device("cpu", 0)
"""Device of the imagined GPU. For torch it is the CPU, but it is unequal to ``torch.device("cpu")``."""

COLLECTIVES = (
    "allreduce",
    "allreduce_coalesced",
    "allgather",
    "_allgather_base",
    "allgather_into_tensor_coalesced",
    "alltoall",
    "alltoall_base",
    "broadcast",
    "gather",
    "recv",
    "reduce",
    "reduce_scatter",
    "_reduce_scatter_base",
    "reduce_scatter_tensor_coalesced",
    "scatter",
    "send",
)
BETWEEN_DEVICES = ("copy_", "_foreach_copy_", "to", "type_as", "__getitem__", "__setitem__", "__set__", "__get__")
"""Functions that accept tensors of two devices."""


class DrawnOnCPU(TorchFunctionMode):
    """Draws from a CPU generator on the CPU, and moves the numbers to the default device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        generator = kwargs.get("generator")
        if generator is None or generator.device != CPU or kwargs.get("device") is not None:
            return func(*args, **kwargs)
        if func in _device_constructors():
            return func(*args, **kwargs, device=CPU).to(torch.get_default_device())
        if args and isinstance(args[0], torch.Tensor) and not args[0].is_cpu:  # such as Tensor.normal_
            return args[0].copy_(func(torch.empty_like(args[0], device=CPU), *args[1:], **kwargs))
        return func(*args, **kwargs)


class Imagined(DrawnOnCPU):
    """Tells CPU tensors that were made by name from those of the default device, which all lie on the CPU.

    Args:
        made_by_name: weak keys, the tensors that a GPU rank would have on the CPU.
        default: False inside a backward, where torch applies no default device.
    """

    def __init__(self, made_by_name: Any, default: bool = True) -> None:
        super().__init__()
        self.made_by_name, self.default = made_by_name, default

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        given = [t for t in _tensors((args, kwargs)) if t.device == CPU]
        by_name = [t for t in given if t in self.made_by_name]
        by_torch = _called_by_torch()
        if name == "__get__" and func == torch.Tensor.device.__get__:
            return IMAGINED if given and not (by_name or by_torch) else func(*args)
        if name == "numpy" and not (by_name or by_torch):
            raise RuntimeError("numpy() of a tensor on the default device: call cpu() first")
        shapes = [tuple(t.shape) for t in by_name if t.dim()]  # a CPU scalar may meet any device
        if shapes and len(by_name) < len(given) and name not in BETWEEN_DEVICES:
            raise RuntimeError(
                f"{name}() got a CPU tensor {shapes[0]} and one of the default device. Make both without device="
            )
        found = super().__torch_function__(func, types, args, kwargs)
        device = self._device(name, args, kwargs)
        if device is not None:
            on_cpu = device in (CPU, "cpu") and not by_torch
        elif func in _device_constructors():
            on_cpu = not (by_torch or (self.default and torch.get_default_device() == IMAGINED))
        else:
            on_cpu = name == "from_numpy" or (bool(given) and len(by_name) == len(given))
        if name in ("to", "cpu") and found is args[0] and on_cpu != bool(by_name):
            found = found.clone()  # a copy to another device
        if name.startswith("__") or not name.endswith("_"):  # not a method that changes its tensor
            for made in _tensors(found):
                if on_cpu and not any(made is each for each in given):
                    self.made_by_name[made] = True
        return found

    def _device(self, name: str, args: Any, kwargs: Any) -> Any:
        """Return the device that a call names, or None."""
        if name != "to":
            return CPU if name == "cpu" else kwargs.get("device")
        named = [each for each in (*args[1:], *kwargs.values()) if isinstance(each, (str, torch.device, torch.Tensor))]
        if not named or not isinstance(named[0], torch.Tensor):
            return named[0] if named else None
        return CPU if named[0] in self.made_by_name else IMAGINED


def imagine() -> None:
    """Let this process find tensors on the wrong device until it ends."""
    made_by_name: Any = WeakIdKeyDictionary()
    Imagined(made_by_name).__enter__()  # type: ignore[no-untyped-call]
    run_backward = vars(torch.autograd)["_engine_run_backward"]

    def entered(*args: Any, **kwargs: Any) -> Any:
        with Imagined(made_by_name, default=False):  # torch has left the mode before it calls the handler of backward()
            return run_backward(*args, **kwargs)

    torch.autograd._engine_run_backward = entered  # type: ignore[attr-defined]
    for name in COLLECTIVES:
        setattr(dist.ProcessGroup, name, _checked(name, getattr(dist.ProcessGroup, name), made_by_name))
    # torch.load(map_location=tensor.device) asks for this place by name.
    torch.serialization.register_package(
        5, lambda storage: None, lambda storage, at: storage if at == "cpu:0" else None
    )
    _carry_imagined_tensors()


def _checked(name: str, collective: Callable[..., Any], made_by_name: Any) -> Callable[..., Any]:
    def checked(*args: Any, **kwargs: Any) -> Any:
        # Other libraries, such as torchft, choose gloo themselves.
        ours = args[0] in dist.distributed_c10d._world.pg_map
        for tensor in _tensors((args[1:], kwargs)):
            if ours and tensor in made_by_name:
                raise RuntimeError(
                    f"{name}() got a CPU tensor of shape {tuple(tensor.shape)}, which NCCL does not carry. "
                    "Make it without device=, or mark the test with pytest.mark.cpu(reason)"
                )
        return collective(*args, **kwargs)

    return checked


def _carry_imagined_tensors() -> None:
    """Let our packages believe that gloo and FSDP2 use the imagined GPU."""
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    import ch_core

    def device(group: Any) -> torch.device:  # torch itself compares it with the parameters, which are on the CPU
        real: torch.device = vars(group)["device"]
        return real if _called_by_torch() else IMAGINED

    with_setter = property(device, lambda group, real: vars(group).__setitem__("device", real))
    FSDPParamGroup.device = with_setter  # type: ignore[assignment]

    real = ch_core.device_of_backend
    for module in list(sys.modules.values()):
        if vars(module).get("device_of_backend") is real:
            module.device_of_backend = lambda backend: IMAGINED  # type: ignore[attr-defined]


def _called_by_torch() -> bool:
    """True if torch's own code calls, or gives a device to the function that calls.

    Torch takes the device of a group, a mesh or a model, which is right on a GPU, too.
    """
    frame: Any = sys._getframe(2)
    code = frame.f_code
    given = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    callers = (frame, frame.f_back) if "device" in given else (frame,)
    return any(str(each.f_globals.get("__name__")).partition(".")[0] == "torch" for each in callers if each)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
