"""What a managed model's trampoline calls: plain averaging, or an engine. Neither ever raises for a lost peer."""

from collections.abc import Callable, Mapping
from functools import partial

import torch

from ch_ddp.adapter import DDPDriver, Finalizer, TensorFuture, behind_backward, future_for, raise_finalized
from ch_ft.managed_engine import ManagedEngine
from ch_ft.plain_average import Averaging
from ch_ft.used_params import UsedParams
from commhooks import Bucket, GradBucket, TransportError
from commhooks.adapters import Work


class PlainDriver:
    """Averages every bucket with ``manager.allreduce(buffer)``; all of them travel while backward goes on.

    Args:
        averaging: where.
        used: parameters that the model used; averaged beside the last bucket.
        finalizer: of the model.
    """

    def __init__(self, averaging: Averaging, used: UsedParams, finalizer: Finalizer) -> None:
        self.averaging, self.used, self._finalizer = averaging, used, finalizer
        self.calls = 0
        self._futures: list[tuple[TensorFuture, torch.Tensor]] = []

    def __call__(self, bucket: GradBucket, /) -> TensorFuture:
        """Start one bucket; the futures of all are completed by the last."""
        self.calls += 1
        if bucket.index() == 0:  # what is left is of a backward that raised half way
            self.averaging.forget()
            self.used.forget()
            self._futures.clear()
        buffer = bucket.buffer()
        future = future_for(buffer)
        self._futures.append((future, buffer))
        error = self._guarded(lambda: self.averaging.start(buffer))
        if bucket.is_last() or behind_backward():  # a static graph's first iteration has no last one
            error = self._guarded(partial(self._finish, buffer.device)) or error
            for done, reduced in self._futures:
                done.set_result(reduced)
            self._futures.clear()
            self._finalizer.ready()
        if error is not None:
            raise_finalized(error)
        return future

    def check(self) -> None:
        """Nothing is ever kept back."""

    def _finish(self, device: torch.device) -> None:
        everywhere = self.used.map(device)
        self.averaging.start(everywhere)
        if self.averaging.finish():
            self.used.share(everywhere, self.averaging.participating())

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
        used: parameters that the model used; all-reduced beside the last bucket.
        agreement: run at the beginning of every step; raises if the members differ.
    """

    engine: ManagedEngine

    def __init__(
        self, engine: ManagedEngine, names: Mapping[int, str], used: UsedParams, agreement: Callable[[], None]
    ) -> None:
        super().__init__(engine, names)
        self.used, self._agreement = used, agreement
        self._asked: tuple[torch.Tensor, Work] | None = None

    def check(self) -> None:
        """A lost step is tried again; nothing is kept back."""

    def _begin_step(self) -> None:
        super()._begin_step()
        self._asked = None
        self.used.forget()
        self.engine.enter(self._agreement)

    def _take(self, bucket: Bucket, behind: bool) -> None:
        super()._take(bucket, behind)
        if bucket.is_last:
            everywhere = self.used.map(bucket.device)
            self._asked = everywhere, self.engine.transport.all_reduce(everywhere, "max")

    def _finish(self, error: BaseException | None) -> None:
        asked, self._asked = self._asked, None
        error = error or self._share_used(asked)
        for future, buffer in self._futures:
            future.set_result(buffer)
        self._futures.clear()
        if self.finalizer is not None:
            self.finalizer.ready()
        raised = None if error is None else self.engine.lost(error)
        if raised is not None:
            raise_finalized(raised)

    def _share_used(self, asked: tuple[torch.Tensor, Work] | None) -> TransportError | None:
        """Receive the map of used parameters; return the error if a peer was lost."""
        if asked is None:
            return None
        everywhere, work = asked
        try:
            work.wait(None)
        except TransportError as lost:
            self.engine.transport.abort()
            return lost
        self.used.share(everywhere, self.engine.participating)
        return None
