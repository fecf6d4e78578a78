"""Binding and adapter of ``DistributedDataParallel``. :func:`commhooks.attach` calls the adapter."""

import weakref
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ch_core import Engine, Link, RankCheck, transport_over
from ch_ddp.adapter.driver import DDPDriver
from ch_ddp.adapter.finalization import Finalizer
from ch_ddp.adapter.foreign_driver import ForeignDriver
from ch_ddp.adapter.layout import averaged_params, held_params, model_layouts, skips_after
from ch_ddp.adapter.slot import Slot, SlotDriver, acquire_slot
from ch_ddp.adapter.unsynced_backward import UnsyncedBackwardWatch
from commhooks import (
    NO_BACKWARD,
    AttachError,
    AttachOptions,
    Binding,
    Bucket,
    BucketLayout,
    CommHook,
    backward_id,
    plain_engine,
    watch_optimizer,
)

Driver = DDPDriver | ForeignDriver


class SlotBinding(Binding):
    """A driver in the slot of a DDP model: the base of the bindings of DDP, of ``replicate()`` and of DDP over a manager.

    Args:
        model: DDP model.
        names: ``id(parameter)`` -> name in the user's model. The default is the name in the wrapped module.

    Attributes:
        driver: called with every bucket while the handle is attached.
    """

    driver: Driver
    weighs = True

    def __init__(self, model: DistributedDataParallel, names: Mapping[int, str] | None = None) -> None:
        self.names = names if names is not None else {id(p): name for name, p in model.module.named_parameters()}
        named = averaged_params(model, self.names)
        (self.layout, self._layouts), self.params = model_layouts(model, named), [p for _, p in named]
        self._model = weakref.ref(model)  # the model has the slot, and a manager's model the handle: no cycle
        self._finalizer = Finalizer.of(model)

    def place(self, slot: Slot, driver: Driver, expr: str) -> None:
        """Put the driver into the slot."""
        self._slot, self.driver = slot, driver
        driver.finalizer = self._finalizer
        slot.driver, slot.expr = driver, expr

    @abstractmethod
    def plain(self) -> SlotDriver | None:
        """Return the driver that averages after :meth:`detach`."""

    @property
    def layouts(self) -> Sequence[BucketLayout]:
        return self._layouts

    @property
    def accumulates(self) -> bool:
        return any(p.grad is not None for p in self.params)

    @property
    def calls(self) -> int:
        return self.driver.calls

    def detach(self) -> None:
        if self.driver.limits.open and backward_id() != NO_BACKWARD:  # DDP would wait for ever for the first buckets
            raise AttachError(f"{self._slot.expr} is averaging this backward. Call detach() after the backward")
        self._slot.driver, self._slot.expr = self.plain(), None
        self.driver.close()


class DDPBinding(SlotBinding):
    """Binding of a handle to a DDP model.

    Args:
        model: DDP model.
        handle, options: arguments of the adapter.
        names: see :class:`SlotBinding`.
        module: module that the user calls. The default is the wrapped module.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        handle: CommHook,
        options: AttachOptions,
        names: Mapping[int, str] | None = None,
        module: torch.nn.Module | None = None,
    ) -> None:
        super().__init__(model, names)
        self._timeout, self._given, self._group = options.timeout, options.process_group, model.process_group
        self._link: Link | None = options.link
        self._skips_after = partial(_skips_after, self._model) if model.skip_all_reduce_unused_params else None
        slot = acquire_slot(model, self.plain)
        driver = self._make(handle)
        self.watch = watch_optimizer(self.engine, options, model.module.parameters, model.module)
        self._unsynced = UnsyncedBackwardWatch(model, self.params, handle.expr, module)
        if isinstance(driver, DDPDriver):
            driver.set_model(model, self._unsynced.arrivals)
        # The model keeps the driver, so these must not reference the binding, which references the model's parameters.
        driver.on_begin = None if self._given is not None else partial(_follow_group, self._model)
        driver.on_end = self._unsynced.averaged
        self.place(slot, driver, handle.expr)

    @property
    def group(self) -> dist.ProcessGroup:  # type: ignore[override]  # read-only, because _update_process_group changes it
        model = self._model()
        if model is not None:
            self._group = model.process_group
        return self._given if self._given is not None else self._group

    def check(self) -> None:
        if isinstance(self.driver, ForeignDriver):
            self.driver.check()
        super().check()

    def after_agreement(self) -> None:
        """Open the control channel of a foreign hook, after all ranks agreed."""
        if isinstance(self.driver, ForeignDriver):
            self.driver.open_control()

    def verify_gradients(self, every: int) -> None:
        self.driver.check_every = every

    def check_ranks(self, check: RankCheck) -> None:
        check.watch(partial(_equal_params, self._model, self.names), partial(_ranks, self._given, self._model))
        if isinstance(self.driver, ForeignDriver):
            self.driver.rank_check = check
        else:
            self.driver.engine.rank_check = check

    def on_reduced(self, callback: Callable[[Bucket], None] | None) -> None:
        """Call ``callback`` with every bucket as soon as the bucket holds the average.

        The thread that runs the backward calls it. Its exceptions are raised from ``backward()``, on every rank if the
        hook is a reduction.
        """
        if isinstance(self.driver, ForeignDriver):
            self.driver.on_reduced, self.driver.names = callback, self.names
        else:
            self.driver.engine.set_on_reduced(callback)

    def detach(self) -> None:
        super().detach()
        self._unsynced.close()

    def plain(self) -> DDPDriver:
        """Return a driver that averages over the model's group with the same messages as DDP without a hook."""
        model = self._model()
        engine = plain_engine(self.group if model is None else model.process_group, self._timeout)
        driver = DDPDriver(engine, self.names, skips_after=self._skips_after)
        driver.finalizer, driver.on_begin = self._finalizer, partial(_follow_group, self._model)
        return driver

    def _make(self, handle: CommHook) -> Driver:
        if handle.reduction is None:
            use_group = getattr(handle.state, "use_group", None)
            if callable(use_group):  # a state without a group takes the model's
                use_group(self.group)
            hook = cast(Any, handle.built)
            return ForeignDriver(
                hook, handle.state, handle.expr, self._timeout, self.group, skips_after=self._skips_after
            )
        if handle.hook_state is None:
            raise AttachError(f"{handle.expr} needs a HookState as its state, not a {type(handle.state).__name__}")
        transport = transport_over(self.group, self._link, free=True, timeout=self._timeout)
        self.engine = Engine(handle.reduction, transport, handle.hook_state, timeout=self._timeout)
        # With lazy allocation DDP frees its buckets after each backward. Kept buckets would hold that memory.
        if not getattr(self._model(), "lazy_bucket_allocation", False):
            self.engine.keep_buckets()
        return DDPDriver(self.engine, self.names, skips_after=self._skips_after)


ModelRef = weakref.ref[DistributedDataParallel]


def _follow_group(model_ref: ModelRef, driver: Driver) -> None:
    """Move a driver to the model's current group, which ``_update_process_group`` may have changed."""
    model = model_ref()
    if model is not None and not driver.uses_group(model.process_group):
        driver.move(model.process_group)


def _skips_after(model_ref: ModelRef, index: int) -> bool:
    model = model_ref()
    return model is not None and skips_after(model, index)


def _equal_params(model_ref: ModelRef, names: Mapping[int, str]) -> list[tuple[str, torch.nn.Parameter]]:
    model = model_ref()
    return held_params(model, names) if model is not None else []


def _ranks(group: dist.ProcessGroup | None, model_ref: ModelRef) -> Sequence[int]:
    model = model_ref()
    return dist.get_process_group_ranks(group if group is not None or model is None else model.process_group)


def adapter(model: torch.nn.Module, handle: CommHook, options: AttachOptions) -> DDPBinding:
    """Attach a handle to a DDP model (a ``commhooks_adapter``)."""
    assert isinstance(model, DistributedDataParallel)  # noqa: S101 - the registry matched the class
    return DDPBinding(model, handle, options)


adapter.idles_alone = True  # type: ignore[attr-defined]  # commhooks.attach reads this attribute
