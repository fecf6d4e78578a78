"""The adapter for ``DistributedDataParallel``: one trampoline per model, registered once.

torch lets a model have one hook for ever. The trampoline is that hook; what it calls can be changed, so a handle can
be detached and another attached.
"""

import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakIdKeyDictionary

from commhooks.attaching import AttachOptions
from commhooks.bucket import BucketLayout, ParamLayout, contiguous_stride
from commhooks.control import Control
from commhooks.ddp import DDPDriver, TensorFuture
from commhooks.engine import Engine
from commhooks.errors import AttachError, StateError
from commhooks.foreign import ForeignDriver
from commhooks.handle import CommHook
from commhooks.reduction import Plain
from commhooks.state import HookState
from commhooks.transport import ProcessGroupTransport
from commhooks.typing import GradBucket
from commhooks.watch import OptimizerWatch, SyncWatch

Driver = DDPDriver | ForeignDriver


class SlotDriver(Protocol):
    """What a trampoline calls for every bucket."""

    calls: int

    def __call__(self, bucket: GradBucket, /) -> TensorFuture: ...

    def check(self) -> None: ...


class Slot:
    """What the trampoline of one model calls at present; empty in a copy of the model, whose reducer has no hook."""

    def __init__(self, driver: SlotDriver | None = None) -> None:
        self.driver = driver
        self.holder: str | None = None  # expression of the attached handle
        self.watch: SyncWatch | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return (Slot, ())


_SLOTS = WeakIdKeyDictionary()  # DDP model -> Slot


def trampoline(state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The only hook ever registered on a model; ``state`` is its :class:`Slot`."""
    if not isinstance(state, Slot) or state.driver is None:
        raise AttachError("the commhooks trampoline was registered by hand; use commhooks.attach(model, ...)")
    if state.watch is not None and bucket.is_last():
        state.watch.synchronised()
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
        self._outcome = self._watch(options)
        self._slot.driver, self._slot.holder = self._driver, handle.expr
        self._slot.watch = SyncWatch(model, handle.expr)

    @property
    def calls(self) -> int:
        return self._driver.calls

    def check(self) -> None:
        self._driver.check()

    def ready(self) -> None:
        """The ranks have agreed: make what needs all of them."""
        if isinstance(self._driver, ForeignDriver) and dist.get_world_size(self.group) > 1:
            self._driver.control = Control(self.group, self._timeout)

    def verify_gradients(self, every: int) -> None:
        self._driver.check_every = every

    def detach(self) -> None:
        self._slot.driver, self._slot.holder = self.plain(), None
        if self._slot.watch is not None:
            self._slot.watch.close()
            self._slot.watch = None
        if self._outcome is not None:
            self._outcome.close()
        if isinstance(self._driver, ForeignDriver):
            self._driver.close()

    def plain(self) -> DDPDriver:
        """Plain averaging over the model's group, message for message as DDP does it without a hook."""
        engine = Engine(Plain(), ProcessGroupTransport(self.group), timeout=self._timeout)
        engine.sends_status = False
        return DDPDriver(engine, self.names)

    def _make(self, handle: CommHook) -> Driver:
        if handle.reduction is None:
            use_group = getattr(handle.state, "use_group", None)
            if callable(use_group):  # a state that takes the model's group where it was given none
                use_group(self.group)
            return ForeignDriver(handle.built, handle.state, handle.expr, self._timeout)
        if not isinstance(handle.state, HookState):
            raise AttachError(f"the state of {handle.expr} is a HookState; got {type(handle.state).__name__}")
        transport = ProcessGroupTransport(self.group)
        owned(handle.state, self._slot, handle.expr)
        self.engine = Engine(handle.reduction, transport, handle.state, timeout=self._timeout)
        self.engine.keep_buckets = True
        return DDPDriver(self.engine, self.names)

    def _watch(self, options: AttachOptions) -> OptimizerWatch | None:
        if options.optimizer is None and options.scaler is None:
            return None
        watch = OptimizerWatch(options.optimizer, options.scaler)
        if self.engine is not None:
            self.engine.outside = watch
            self.engine.loss_scale = watch.scale if options.scaler is not None else None
        return watch


def adapter(model: torch.nn.Module, handle: CommHook, options: AttachOptions) -> DDPBinding:
    """The ``commhooks_adapter`` of DDP."""
    assert isinstance(model, DistributedDataParallel)  # noqa: S101 - the registry matched the class
    return DDPBinding(model, handle, options)


def claim(model: DistributedDataParallel, plain: Callable[[], SlotDriver]) -> Slot:
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
    copied = [state for state, hook in _registered(model) if isinstance(state, Slot) and state.driver is None]
    if copied and len(copied) == len(model._comm_hooks):
        model._comm_hooks.clear()  # of the model that this one is a copy of; its own reducer has none
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


def _registered(model: DistributedDataParallel) -> list[tuple[object, object]]:
    """``(state, hook)`` of everything the Python side of DDP believes to be registered."""
    return [(state, hook) for hook, state in model._comm_hooks]


_OWNERS = WeakIdKeyDictionary()  # HookState -> weak reference to the slot of the model that it serves


def owned(state: HookState, slot: Slot, name: str) -> None:
    """Bind a state to a model.

    Raises:
        StateError: it serves another model that is still alive.
    """
    owner = _OWNERS.get(state)
    other = owner() if owner is not None else None
    if other is not None and other is not slot and other.holder is not None:
        raise StateError(
            f"the state given to {name} serves another model already (attached there as {other.holder}): each would get "
            "the other's residuals. Make one state per model, or detach() the other handle first"
        )
    _OWNERS[state] = weakref.ref(slot)


def model_layout(module: torch.nn.Module) -> BucketLayout:
    """All trainable parameters as one virtual bucket, in model order."""
    params, offset, dtype, device = [], 0, torch.float32, torch.device("cpu")
    sparse = {id(m.weight) for m in module.modules() if getattr(m, "sparse", False) and hasattr(m, "weight")}
    for name, p in module.named_parameters():
        if p.requires_grad:
            shape = tuple(p.shape)
            kind = "sparse" if id(p) in sparse else "complex" if p.is_complex() else "dense"
            entry = ParamLayout(name, shape, contiguous_stride(shape), offset, kind)
            params.append(entry)
            offset += entry.numel
            dtype, device = p.dtype, p.device
    return BucketLayout(params, offset, dtype, device)
