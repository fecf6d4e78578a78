"""Binding and adapter of ``DistributedDataParallel``. :func:`commhooks.attach` calls the adapter."""

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ch_core import Engine, ProcessGroupTransport, RankCheck
from ch_ddp.adapter.driver import DDPDriver
from ch_ddp.adapter.finalization import Finalizer
from ch_ddp.adapter.foreign_driver import ForeignDriver
from ch_ddp.adapter.layout import averaged_params, held_params, model_layouts, skips_after
from ch_ddp.adapter.slot import acquire_slot
from ch_ddp.adapter.unsynced_backward import UnsyncedBackwardWatch
from commhooks import AttachError, AttachOptions, Binding, Bucket, BucketLayout, CommHook, Plain, watch_optimizer

Driver = DDPDriver | ForeignDriver


class DDPBinding(Binding):
    """Binding of a handle to a DDP model.

    Args:
        model: DDP model.
        handle, options: arguments of the adapter.
        names: ``id(parameter)`` -> name in the user's model. The default is the name in the wrapped module.
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
        self.names = names if names is not None else {id(p): name for name, p in model.module.named_parameters()}
        named = averaged_params(model, self.names)
        (self.layout, self._layouts), self.params = model_layouts(model, named), [p for _, p in named]
        self.engine: Engine | None = None
        self._timeout, self._given, self._model = options.timeout, options.process_group, weakref.ref(model)
        self._group: dist.ProcessGroup = model.process_group
        self._skips_after = partial(_skips_after, self._model) if model.skip_all_reduce_unused_params else None
        self._finalizer = Finalizer.of(model)
        self._slot = acquire_slot(model, self.plain)
        self._driver = self._make(handle)
        self._driver.finalizer = self._finalizer
        self._watch = watch_optimizer(self.engine, options, model.module.parameters, model.module)
        self._unsynced = UnsyncedBackwardWatch(model, self.params, handle.expr, module)
        if isinstance(self._driver, DDPDriver):
            self._driver.set_model(model, self._unsynced.arrivals)
        # The model keeps the driver, so these must not reference the binding, which references the model's parameters.
        self._driver.on_begin = None if self._given is not None else partial(_follow_group, self._model)
        self._driver.on_end = self._unsynced.averaged
        self._slot.driver, self._slot.expr = self._driver, handle.expr

    @property
    def group(self) -> dist.ProcessGroup:  # type: ignore[override]  # read-only, because _update_process_group changes it
        model = self._model()
        if model is not None:
            self._group = model.process_group
        return self._given if self._given is not None else self._group

    @property
    def layouts(self) -> Sequence[BucketLayout]:
        return self._layouts

    @property
    def calls(self) -> int:
        return self._driver.calls

    def check(self) -> None:
        self._driver.check()

    def after_agreement(self) -> None:
        """Open the control channel of a foreign hook, after all ranks agreed."""
        if isinstance(self._driver, ForeignDriver):
            self._driver.open_control()

    def verify_gradients(self, every: int) -> None:
        self._driver.check_every = every

    def check_ranks(self, check: RankCheck) -> None:
        check.watch(partial(_equal_params, self._model, self.names), partial(_ranks, self._given, self._model))
        if isinstance(self._driver, ForeignDriver):
            self._driver.rank_check = check
        else:
            self._driver.engine.rank_check = check

    def on_reduced(self, callback: Callable[[Bucket], None] | None) -> None:
        """Call ``callback`` with every bucket as soon as the bucket holds the average.

        The thread that runs the backward calls it. Its exceptions are raised from ``backward()``, on every rank if the
        hook is a reduction.
        """
        if isinstance(self._driver, ForeignDriver):
            self._driver.on_reduced, self._driver.names = callback, self.names
        else:
            self._driver.engine.set_on_reduced(callback)

    def detach(self) -> None:
        self._slot.driver, self._slot.expr = self.plain(), None
        self._unsynced.close()
        if self._watch is not None:
            self._watch.close()
        self._driver.close()

    def plain(self) -> DDPDriver:
        """Return a driver that averages over the model's group with the same messages as DDP without a hook."""
        model = self._model()
        group = self.group if model is None else model.process_group
        engine = Engine(Plain(), ProcessGroupTransport(group), timeout=self._timeout, sends_status=False)
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
        transport = ProcessGroupTransport(self.group, free=True)
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
