"""Turns a reduction into a plain ``(state, bucket)`` function for ``register_comm_hook``.

Such a function sees no parameter names, so it keys parameters by position in model order and shape.
"""

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakIdKeyDictionary

from ch_core import Engine, ProcessGroupTransport
from ch_ddp.adapter.driver import DDPDriver
from ch_ddp.adapter.finalization import Finalizer
from ch_ddp.adapter.futures import behind_backward
from ch_ddp.adapter.layout import Numbered, models_of
from commhooks import AttachError, GradBucket, HookState, Reduction


class BareHook:
    """A reduction as a hook with PyTorch's signature, ``hook(state, bucket)``, for ``register_comm_hook``.

    The state is a process group, ``None`` (the default group), or a :class:`~ch_core.state.HookState`, which serves
    one model and may have a ``process_group``. It can be pickled. Wrappers recognise it by its ``reduction``.

    Args:
        reduction: reduction to run, or a function that makes it from the hook's state.
        name: name that torch and frameworks show.
    """

    def __init__(self, reduction: Reduction | Callable[[Any], Reduction], name: str) -> None:
        self.reduction = reduction
        self.__name__ = self.__qualname__ = name
        self._forget()

    def __call__(self, state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        if not isinstance(bucket, GradBucket):
            raise AttachError(
                f"{self.__name__} was called with {type(bucket).__name__} instead of a GradBucket: it does not support "
                "torch._dynamo.config.optimize_ddp='python_reducer'; use torch.compile's default DDP mode"
            )
        return self._driver(state, bucket)(bucket)

    def __repr__(self) -> str:
        return f"<hook {self.__name__}>"

    def __getstate__(self) -> dict[str, Any]:
        return {"reduction": self.reduction, "__name__": self.__name__, "__qualname__": self.__qualname__}

    def __setstate__(self, values: dict[str, Any]) -> None:
        self.__dict__.update(values)
        self._forget()

    def _forget(self) -> None:
        self._of_param = WeakIdKeyDictionary()  # parameter -> DDPDriver
        self._open: list[DDPDriver] = []  # drivers whose step may be running

    def _driver(self, state: object, bucket: GradBucket) -> DDPDriver:
        """Return the driver of this state. If the state is a group, return the driver of the parameters' model."""
        params = bucket.parameters()
        if isinstance(state, HookState):
            driver: DDPDriver | None = state.drivers.get(self)  # it lives as long as the state
            if driver is None or not driver.uses_group(getattr(state, "process_group", None)):
                driver = state.drivers[self] = self._new(state, params[0])
            return driver
        found: DDPDriver | None = self._of_param.get(params[0])
        if found is not None and not found.uses_group(state):
            found = None  # the model was wrapped again over another group, or uses several groups
        if found is None:
            found = self._running(state, bucket) or self._new(state, params[0])
        self._open = [one for one in self._open if one.limits.open and one is not found]
        if not bucket.is_last():
            self._open.append(found)
        if not behind_backward() or found.engine.reduction.fields:  # behind a backward, two models look equal
            for param in params:
                self._of_param[param] = found
        return found

    def _running(self, state: object, bucket: GradBucket) -> DDPDriver | None:
        """Return the driver whose running step this bucket belongs to."""
        for one in self._open:
            if one.uses_group(state) and not one.limits.begins(bucket.index()):
                return one
        return None

    def _new(self, state: object, param: torch.Tensor) -> DDPDriver:
        engine = self._engine(state)
        driver = DDPDriver(engine, None if isinstance(state, HookState) else Numbered(), hook=self.__name__)
        driver.finalizer = Finalizer(partial(_having, weakref.ref(param)))
        return driver

    def _engine(self, state: object) -> Engine:
        # First, because this function gives the best message for a wrong state.
        made = self.reduction if isinstance(self.reduction, Reduction) else self.reduction(state)
        if isinstance(state, HookState):
            # The state keeps the driver. A strong reference back would be a cycle, and both would outlive the model.
            group, kept = getattr(state, "process_group", None), weakref.proxy(state)
        elif state is None or isinstance(state, dist.ProcessGroup):
            group, kept = state, HookState()
        else:
            raise AttachError(
                f"the state of {self.__name__} is a process group, None, or a HookState; got {type(state).__name__}"
            )
        transport = ProcessGroupTransport(group, free=True)
        return Engine(made, transport, kept, timeout=None)  # the group has its own time-out


def _having(param: "weakref.ref[torch.Tensor]") -> list[DistributedDataParallel]:
    found = param()
    return [] if found is None else models_of([found])


def as_hook(reduction: Reduction | Callable[[Any], Reduction], name: str | None = None) -> BareHook:
    """Return a hook with PyTorch's signature for a reduction, or for a function that makes one from the hook's state.

    Example:
        >>> from commhooks import Plain
        >>> as_hook(Plain(), "my_hook")
        <hook my_hook>
    """
    if name is None:
        name = reduction.name if isinstance(reduction, Reduction) else getattr(reduction, "__name__", "hook")
    return BareHook(reduction, name)
