"""The adapter for ``DistributedDataParallel``: one trampoline per model, registered once.

torch lets a model have one hook for ever. The trampoline is that hook; what it calls can be changed, so a handle can
be detached and another attached.
"""

from collections.abc import Callable
from typing import Protocol

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakIdKeyDictionary

from commhooks.attaching import AttachOptions
from commhooks.bucket import BucketLayout, ParamLayout, contiguous_stride
from commhooks.ddp import DDPDriver, TensorFuture
from commhooks.engine import Engine
from commhooks.errors import AttachError
from commhooks.foreign import ForeignDriver
from commhooks.handle import CommHook
from commhooks.reduction import Plain
from commhooks.state import HookState
from commhooks.transport import ProcessGroupTransport
from commhooks.typing import GradBucket

class Driver(Protocol):
    """What a trampoline calls for every bucket."""

    calls: int

    def __call__(self, bucket: GradBucket, /) -> TensorFuture: ...

    def check(self) -> None: ...


class Slot:
    """What the trampoline of one model calls at present."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.holder: str | None = None  # expression of the attached handle


_SLOTS = WeakIdKeyDictionary()  # DDP model -> Slot


def trampoline(state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The only hook ever registered on a model; ``state`` is its :class:`Slot`."""
    if not isinstance(state, Slot):
        raise AttachError("the commhooks trampoline was registered by hand; use commhooks.attach(model, ...)")
    return state.driver(bucket)


class DDPBinding:
    """A handle in place on a DDP model."""

    def __init__(self, model: DistributedDataParallel, handle: CommHook, options: AttachOptions) -> None:
        self.names = {id(p): name for name, p in model.module.named_parameters()}
        self.layout = model_layout(model.module)
        self.group: dist.ProcessGroup = options.process_group or model.process_group
        self.engine: Engine | None = None
        self._timeout = options.timeout
        self._slot = claim(model, self.plain)
        self._driver = self._make(handle)
        self._slot.driver, self._slot.holder = self._driver, handle.expr

    @property
    def calls(self) -> int:
        return self._driver.calls

    def check(self) -> None:
        self._driver.check()

    def detach(self) -> None:
        self._slot.driver, self._slot.holder = self.plain(), None

    def plain(self) -> DDPDriver:
        """Plain averaging over the model's group."""
        return DDPDriver(Engine(Plain(), ProcessGroupTransport(self.group), timeout=self._timeout), self.names)

    def _make(self, handle: CommHook) -> Driver:
        if handle.reduction is None:
            return ForeignDriver(handle.built, handle.state, handle.expr, self._timeout)
        if not isinstance(handle.state, HookState):
            raise AttachError(f"the state of {handle.expr} is a HookState; got {type(handle.state).__name__}")
        transport = ProcessGroupTransport(self.group)
        self.engine = Engine(handle.reduction, transport, handle.state, timeout=self._timeout)
        return DDPDriver(self.engine, self.names)


def adapter(model: torch.nn.Module, handle: CommHook, options: AttachOptions) -> DDPBinding:
    """The ``commhooks_adapter`` of DDP."""
    assert isinstance(model, DistributedDataParallel)  # noqa: S101 - the registry matched the class
    return DDPBinding(model, handle, options)


def claim(model: DistributedDataParallel, plain: Callable[[], Driver]) -> Slot:
    """The model's slot, with the trampoline registered; ``plain`` makes what it calls until a hook is attached.

    Raises:
        AttachError: another handle or a foreign hook is there.
    """
    slot: Slot | None = _SLOTS.get(model)
    if slot is not None:
        if slot.holder is not None:
            raise AttachError(
                f"this model has {slot.holder} attached already: handle.detach() first, then attach again"
            )
        return slot
    if model._comm_hooks:
        names = ", ".join(getattr(hook, "__qualname__", repr(hook)) for hook, _ in model._comm_hooks)
        raise AttachError(
            f"this model's only hook slot is taken by {names}, and torch cannot remove it. Wrap the model anew and "
            "attach instead of calling register_comm_hook"
        )
    slot = Slot(plain())
    try:
        model.register_comm_hook(slot, trampoline)
    except RuntimeError as error:
        raise AttachError(
            f"torch refused a hook on this model ({error}); its slot is used by DDP mixed precision, an overlapped "
            "optimizer or a built-in hook"
        ) from error
    _SLOTS[model] = slot
    return slot


def model_layout(module: torch.nn.Module) -> BucketLayout:
    """All trainable parameters as one virtual bucket, in model order."""
    params, offset, dtype, device = [], 0, torch.float32, torch.device("cpu")
    for name, p in module.named_parameters():
        if p.requires_grad:
            shape = tuple(p.shape)
            entry = ParamLayout(name, shape, contiguous_stride(shape), offset, "complex" if p.is_complex() else "dense")
            params.append(entry)
            offset += entry.numel
            dtype, device = p.dtype, p.device
    return BucketLayout(params, offset, dtype, device)
