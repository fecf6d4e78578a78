"""Gathers of parameter shards: several may be in flight, and each ends when its weights are needed.

The engine starts all collectives of a gather in the call, on the thread of the call, and decodes in :meth:`.complete`. So the
messages travel while the model computes, and ranks start collectives in the order of the program.
"""

import time

from ch_core.bucket import Bucket
from ch_core.engine.engine import Engine
from ch_core.engine.step import BucketRun

_LAYOUTS = 4096  # a long evaluation is one step, and its layouts must not fill the memory


class GatherEngine(Engine):
    """Runs a :class:`~ch_core.Gathered` reduction over one group of ranks.

    A step begins with the first gather after the last :meth:`finish`, in training or evaluation. If a reduction raises on one
    rank, that rank sends void codes and computes with NaN, and :meth:`finish` returns an error on all ranks.
    """

    def launch(self, bucket: Bucket) -> BucketRun:
        """Encode this rank's shards and start the messages.

        Raises:
            TransportError: the transport is lost.
        """
        begun = time.perf_counter()
        if not self.in_step:
            self._begin(bucket.device)
        step = self.step
        flying = {run.number for run in step.in_flight}
        # The smallest free number, because scratch memory belongs to numbers.
        step.count = next(n for n in range(len(flying) + 1) if n not in flying)
        try:
            run = self._add(bucket)
            self._start_first_stage(run)
        except Exception as error:
            self._lose(error)
        del step.layouts[_LAYOUTS:]
        self.counters.hook_seconds += time.perf_counter() - begun
        return run

    def complete(self, run: BucketRun) -> None:
        """Wait for the messages of a gather and decode them. A later stage of a reduction is started here.

        Raises:
            TransportError: the transport is lost.
        """
        begun = time.perf_counter()
        if not run.done and self.failure is not None:
            raise self.failure
        try:
            while not run.done:
                self._advance([run])
        except Exception as error:
            self._lose(error)
        self.counters.hook_seconds += time.perf_counter() - begun

    def _may_send_status_in_drain(self) -> bool:
        """False, because the engines of other axes end their steps after this one, so all ranks must know of its errors."""
        return False

    def abandon(self) -> None:
        """Keep the step. An exception in a forward or backward ends no gather, and there is no state to restore."""
        if self.failure is not None:
            super().abandon()
