"""Binding and adapter of ``DistributedDataParallel``. :func:`commhooks.attach` calls the adapter."""

import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ch_ddp.adapter.driver import DDPDriver
from ch_ddp.adapter.finalization import Finalizer
from ch_ddp.adapter.foreign import Control, ForeignDriver
from ch_ddp.adapter.layout import averaged_params, model_layout
from ch_ddp.adapter.slot import acquire_slot
from ch_ddp.adapter.unsynced_backward import UnsyncedBackwardWatch
from commhooks import AttachError, Bucket, CommHook, Plain
from commhooks.adapters import (
    AttachOptions,
    Binding,
    Engine,
    ProcessGroupTransport,
    RankCheck,
    watch_optimizer,
)

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
        self.layout, self.params = model_layout(model, self.names), [p for _, p in averaged_params(model)]
        self.group: dist.ProcessGroup = options.process_group or model.process_group
        self.engine: Engine | None = None
        self._timeout = options.timeout
        self._model = weakref.ref(model)
        self._finalizer = Finalizer.of(model)
        self._slot = acquire_slot(model, self.plain)
        self._driver = self._make(handle)
        self._driver.finalizer = self._finalizer
        if isinstance(self._driver, DDPDriver):
            self._driver.set_model(model)
        self._watch = watch_optimizer(self.engine, options, model.module.parameters, model.module)
        self._slot.driver, self._slot.expr = self._driver, handle.expr
        self._slot.watch = UnsyncedBackwardWatch(model, handle.expr, module)
        self._slot.update_group = self._update_group if options.process_group is None else None

    @property
    def calls(self) -> int:
        return self._driver.calls

    def check(self) -> None:
        self._driver.check()

    def after_agreement(self) -> None:
        """Open the control channel of a foreign hook, after all ranks agreed."""
        if isinstance(self._driver, ForeignDriver) and dist.get_world_size(self.group) > 1:
            self._driver.control = Control(self.group, self._timeout)

    def verify_gradients(self, every: int) -> None:
        self._driver.check_every = every

    def check_ranks(self, check: RankCheck) -> None:
        check.watch(self._equal_params, lambda: dist.get_process_group_ranks(self.group))
        if isinstance(self._driver, ForeignDriver):
            self._driver.rank_check = check
        else:
            self._driver.engine.rank_check = check

    def _equal_params(self) -> list[tuple[str, torch.nn.Parameter]]:
        model = self._model()
        return averaged_params(model, self.names, frozen=True) if model is not None else []

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
        plain = self._slot.driver = self.plain()
        self._slot.expr = None
        self._slot.update_group = partial(
            _move_to_group_of, self._model, plain
        )  # references nothing of the detached handle
        if self._slot.watch is not None:
            self._slot.watch.close()
            self._slot.watch = None
        if self._watch is not None:
            self._watch.close()
        self._driver.close()

    def _update_group(self) -> None:
        """Move the driver to the model's current group, which ``_update_process_group`` may have changed."""
        model = self._model()
        if model is None or model.process_group is self.group:
            return
        self.group = model.process_group
        if isinstance(self._driver, ForeignDriver):
            self._driver.close()
            self.after_agreement()
            if self._driver.rank_check is not None:
                self._driver.rank_check.restart()
        else:
            _move_to_group_of(self._model, self._driver)

    def _give_up(self) -> None:
        ProcessGroupTransport(self.group).abort()

    def plain(self) -> DDPDriver:
        """Return a driver that averages over the model's group with the same messages as DDP without a hook."""
        model = self._model()
        group = self.group if model is None else model.process_group
        engine = Engine(Plain(), ProcessGroupTransport(group), timeout=self._timeout, sends_status=False)
        driver = DDPDriver(engine, self.names)
        driver.finalizer = self._finalizer
        return driver

    def _make(self, handle: CommHook) -> Driver:
        if handle.reduction is None:
            use_group = getattr(handle.state, "use_group", None)
            if callable(use_group):  # a state without a group takes the model's
                use_group(self.group)
            driver = ForeignDriver(cast(Any, handle.built), handle.state, handle.expr, self._timeout)
            driver.give_up = self._give_up
            return driver
        if handle.hook_state is None:
            raise AttachError(f"{handle.expr} needs a HookState as its state, not a {type(handle.state).__name__}")
        transport = ProcessGroupTransport(self.group, free=True)
        self.engine = Engine(handle.reduction, transport, handle.hook_state, timeout=self._timeout)
        # With lazy allocation DDP frees its buckets after each backward. Kept buckets would hold that memory.
        if not getattr(self._model(), "lazy_bucket_allocation", False):
            self.engine.keep_buckets()
        return DDPDriver(self.engine, self.names)


def _move_to_group_of(model_ref: "weakref.ref[DistributedDataParallel]", driver: DDPDriver) -> None:
    model, engine = model_ref(), driver.engine
    if model is not None and not driver.uses_group(model.process_group):
        engine.move(ProcessGroupTransport(model.process_group, free=engine.transport.free))


def adapter(model: torch.nn.Module, handle: CommHook, options: AttachOptions) -> DDPBinding:
    """Attach a handle to a DDP model (a ``commhooks_adapter``)."""
    assert isinstance(model, DistributedDataParallel)  # noqa: S101 - the registry matched the class
    return DDPBinding(model, handle, options)


adapter.idles_alone = True  # type: ignore[attr-defined]  # commhooks.attach reads this attribute
