"""The adapter for ``DistributedDataParallel``: one trampoline per model, registered once.

torch lets a model have one hook for ever. The trampoline is that hook; what it calls can be changed, so a handle can
be detached and another attached.
"""

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakIdKeyDictionary

from commhooks.attaching import AttachOptions
from commhooks.bucket import Bucket, BucketLayout, ParamLayout, contiguous_stride, dense
from commhooks.control import Control
from commhooks.ddp import DDPDriver, TensorFuture, over
from commhooks.engine import Engine
from commhooks.errors import AttachError, HookNotSupportedError
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
        self.follow: Callable[[], None] | None = None  # takes notice of a changed process group

    def __reduce__(self) -> tuple[Any, ...]:
        return (Slot, ())


_SLOTS = WeakIdKeyDictionary()  # DDP model -> Slot


def trampoline(state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The only hook ever registered on a model; ``state`` is its :class:`Slot`."""
    if not isinstance(state, Slot) or state.driver is None:
        raise AttachError("the commhooks trampoline was registered by hand; use commhooks.attach(model, ...)")
    if not isinstance(bucket, GradBucket):
        raise HookNotSupportedError(
            f"DDP called the hook {state.holder or 'of a detached handle'} with {type(bucket).__name__} instead of a "
            "GradBucket: hooks do not work under torch._dynamo.config.optimize_ddp='python_reducer'. Use torch.compile's "
            "default DDP mode"
        )
    if state.follow is not None and bucket.index() == 0:
        state.follow()
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
        self._outcome = watch_outcome(self.engine, options)
        self._slot.driver, self._slot.holder = self._driver, handle.expr
        self._slot.watch = SyncWatch(model, handle.expr)
        self._model = weakref.ref(model)
        self._slot.follow = self._follow if options.process_group is None else None

    @property
    def calls(self) -> int:
        return self._driver.calls

    def stats(self) -> dict[str, float]:
        return {"calls": float(self.calls)} if self.engine is None else self.engine.counters.as_dict()

    def check(self) -> None:
        self._driver.check()

    def ready(self) -> None:
        """The ranks have agreed: make what needs all of them."""
        if isinstance(self._driver, ForeignDriver) and dist.get_world_size(self.group) > 1:
            self._driver.control = Control(self.group, self._timeout)

    def verify_gradients(self, every: int) -> None:
        self._driver.check_every = every

    def on_reduced(self, callback: Callable[[Bucket], None] | None) -> None:
        """Have ``callback`` called with every bucket of a backward as soon as it holds the average, on the thread that
        runs the backward. What it raises is raised from ``backward()``, on every rank where the hook is a reduction.
        """
        if isinstance(self._driver, ForeignDriver):
            self._driver.on_reduced, self._driver.names = callback, self.names
        else:
            self._driver.engine.on_reduced = callback

    def detach(self) -> None:
        plain = self._slot.driver = self.plain()
        self._slot.holder = None
        if self._slot.follow is not None:
            self._slot.follow = partial(_go_over, self._model, plain.engine)  # holds nothing of what was attached
        if self._slot.watch is not None:
            self._slot.watch.close()
            self._slot.watch = None
        if self._outcome is not None:
            self._outcome.close()
        if isinstance(self._driver, ForeignDriver):
            self._driver.close()

    def _follow(self) -> None:
        """Go over to the model's present group: ``_update_process_group`` gives it another."""
        model = self._model()
        if model is None or model.process_group is self.group:
            return
        self.group = model.process_group
        if isinstance(self._driver, ForeignDriver):
            self._driver.close()
            self.ready()
        else:
            _go_over(self._model, self._driver.engine)

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
            return ForeignDriver(cast(Any, handle.built), handle.state, handle.expr, self._timeout)
        if not isinstance(handle.state, HookState):
            raise AttachError(f"the state of {handle.expr} is a HookState; got {type(handle.state).__name__}")
        transport = ProcessGroupTransport(self.group, free=True)
        self.engine = Engine(handle.reduction, transport, handle.state, timeout=self._timeout)
        self.engine.keep_buckets = True
        return DDPDriver(self.engine, self.names)


def _go_over(of: "weakref.ref[DistributedDataParallel]", engine: Engine) -> None:
    model = of()
    if model is not None and not over(engine.transport, model.process_group):
        engine.move(ProcessGroupTransport(model.process_group, free=engine.transport.free))


def adapter(model: torch.nn.Module, handle: CommHook, options: AttachOptions) -> DDPBinding:
    """The ``commhooks_adapter`` of DDP."""
    assert isinstance(model, DistributedDataParallel)  # noqa: S101 - the registry matched the class
    return DDPBinding(model, handle, options)


def watch_outcome(engine: Engine | None, options: AttachOptions) -> OptimizerWatch | None:
    """Have the optimizer and scaler given to ``attach`` decide which of an engine's steps count."""
    if options.optimizer is None and options.scaler is None:
        return None
    watch = OptimizerWatch(options.optimizer, options.scaler)
    if engine is not None:
        engine.outside = watch
        engine.loss_scale = watch.scale if options.scaler is not None else None
    return watch


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


def model_layout(module: torch.nn.Module) -> BucketLayout:
    """All trainable parameters as one virtual bucket, in model order."""
    params, offset, dtype, device = [], 0, torch.float32, torch.device("cpu")
    sparse = {id(m.weight) for m in module.modules() if getattr(m, "sparse", False) and hasattr(m, "weight")}
    for name, p in module.named_parameters():
        if p.requires_grad:
            shape = tuple(p.shape)
            kind = "sparse" if id(p) in sparse else "complex" if p.is_complex() else "dense"
            stride = tuple(p.stride()) if dense(p) else contiguous_stride(shape)  # as DDP lays it in a bucket
            entry = ParamLayout(name, shape, stride, offset, kind)
            params.append(entry)
            offset += entry.numel
            dtype, device = p.dtype, p.device
    return BucketLayout(params, offset, dtype, device)
