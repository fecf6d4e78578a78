"""What a managed model's trampoline calls: plain averaging, or an engine. Neither ever raises for a lost peer."""

import logging
from collections.abc import Callable, Mapping

import torch

from ch_ft.averaging import Averaging
from ch_ft.failfast import release
from ch_ft.transaction import ManagedEngine
from commhooks.after import raise_after_backward
from commhooks.ddp import DDPDriver, TensorFuture
from commhooks.errors import CommHooksError, RemoteHookError, TransportError
from commhooks.streams import future_for
from commhooks.typing import GradBucket

log = logging.getLogger("commhooks")


class PlainDriver:
    """Averages every bucket with ``manager.allreduce(buffer)``; all of them travel while backward goes on.

    Args:
        averaging: where.
    """

    def __init__(self, averaging: Averaging) -> None:
        self.averaging = averaging
        self.calls = 0
        self._futures: list[tuple[TensorFuture, torch.Tensor]] = []

    def __call__(self, bucket: GradBucket, /) -> TensorFuture:
        """Start one bucket; the futures of all are completed by the last."""
        self.calls += 1
        if bucket.index() == 0:  # what is left is of a backward that raised half way
            self.averaging.forget()
            self._futures.clear()
        buffer = bucket.buffer()
        future = future_for(buffer)
        self._futures.append((future, buffer))
        error = self._guarded(lambda: self.averaging.start(buffer))
        if bucket.is_last():
            error = self._guarded(self.averaging.finish) or error
            for done, reduced in self._futures:
                done.set_result(reduced)
            self._futures.clear()
        if error is not None:
            raise_after_backward(error)
        return future

    def check(self) -> None:
        """Nothing is ever kept back."""

    def _guarded(self, action: Callable[[], None]) -> Exception | None:
        """An exception must not leave the hook, or DDP never recovers; it is raised from ``backward()``."""
        try:
            action()
        except Exception as error:  # the quorum timed out: this member is out
            self.averaging.forget()
            return error
        return None


class ManagedDriver(DDPDriver):
    """Turns the hook calls of a managed model into steps of an engine.

    Args:
        engine: the engine.
        names: ``id(parameter)`` -> name.
        agreement: run at the beginning of every step; raises if the members differ.
    """

    engine: ManagedEngine

    def __init__(self, engine: ManagedEngine, names: Mapping[int, str], agreement: Callable[[], None]) -> None:
        super().__init__(engine, names)
        self._agreement = agreement
        self._cause: Exception | None = None

    def check(self) -> None:
        """A lost step is tried again; nothing is kept back."""

    def _first(self) -> None:
        super()._first()
        self._cause = None
        try:
            self.engine.begin()
            self._agreement()
        except TransportError as error:
            self.engine.failure = error
            self.engine.transport.abort()
        except Exception as error:  # the members differ, or the quorum timed out
            self._cause = error
            self.engine.failure = TransportError(str(error))
            self.engine.transport.abort()

    def _finish(self, error: BaseException | None) -> None:
        for future, buffer in self._futures:
            future.set_result(buffer)
        self._futures.clear()
        if error is None:
            return
        cause, self._cause = self._cause, None
        if cause is None and isinstance(error, TransportError):
            release(error)  # the frames of its traceback hold tensors and works
            self._report(error)
        elif cause is None and isinstance(error, RemoteHookError):
            log.error("this step is not committed: %s", error)
            self._report(error)
        else:
            raised = cause or error
            self._report(raised)
            raise_after_backward(raised)

    def _report(self, error: BaseException) -> None:
        self.engine.rollback()
        manager = self.engine.transport.manager
        if manager.errored() is None:
            manager.report_error(error if isinstance(error, Exception) else CommHooksError(str(error)))
