"""One bucket during its reduction, with its generator, its plan, and the pending stage."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from ch_core.bucket import Bucket, BucketLayout
from ch_core.engine.collectives import Sender, Stage, fill_nan, void_requests
from ch_core.engine.outcome import BETWEEN, DECODE, ENCODE, StepOutcome
from ch_core.engine.schedule import BucketPlan, CpuTuning
from ch_core.engine.stats import Counters
from ch_core.errors import HookResultError
from ch_core.reduction import Stages
from ch_core.requests import Request, StagePlan, as_tuple
from ch_core.topology import Topology

_OFF: AbstractContextManager[Any] = nullcontext()
_on_this_thread = getattr(torch.autograd, "_profiler_enabled", lambda: True)
_EMPTY_PLAN = BucketPlan((), BucketLayout((), 0, torch.float32, "cpu"))


class BucketRun:
    """One bucket during its reduction.

    Args:
        number: its number among the buckets in flight.
        bucket: the bucket.
        outcome: outcome of its step.

    Attributes:
        plan: the stages that it passes.
        generator: the running reduction.
        stage: number of stages that it has asked for.
        pending: the newest of these stages, until it is done.
        failed: True if the reduction raised on this rank. It then sends NaN until the plan ends, so that no peer waits.
        done: True if it has passed all stages.
    """

    __slots__ = ("bucket", "done", "failed", "generator", "number", "outcome", "pending", "plan", "stage")

    def __init__(self, number: int, bucket: Bucket, outcome: StepOutcome) -> None:
        self.number, self.bucket, self.outcome = number, bucket, outcome
        self.plan = _EMPTY_PLAN
        self.generator: Stages | None = None
        self.stage = 0
        self.pending: Stage | None = None
        self.failed = self.done = False

    @property
    def due(self) -> StagePlan | None:
        """The requests of its next stage; ``None`` after the last one."""
        return self.plan.plan[self.stage] if self.stage < len(self.plan.plan) else None

    def advance(
        self, timeout: float | None, counters: Counters, topology: Topology | None = None
    ) -> tuple[Request, ...] | None:
        """Wait for the pending stage and resume the reduction.

        Errors of the reduction are noted in the outcome. Errors of the transport are raised.

        Args:
            timeout: seconds that the stage may take.
            counters: receive the times.
            topology: of the ranks, if known.

        Returns:
            The requests of the next stage; ``None`` after the last one.
        """
        if self.pending is not None:
            self._wait(self.pending, timeout, counters)
        if not self.failed:
            try:
                return self._resume(counters)
            except BaseException as error:  # Ctrl-C too: raised in the hook it would leave DDP and the peers stuck
                self.fail(error)
        due = self.due
        return None if due is None else void_requests(due, self.outcome.world_size, self.bucket.device, topology)

    def complete(self, on_reduced: Callable[[Bucket], None] | None) -> None:
        """Mark the run done after its last stage, and give the average to a callback.

        Args:
            on_reduced: called with the bucket, unless the reduction failed.
        """
        self.done = True
        if self.failed:  # the bucket may be half decoded, and must not pass for an average
            fill_nan(self.bucket.storage)
        # A finite P and Q may overflow when multiplied in fp16. Packed payloads show NaN and Inf only after decoding.
        if self.plan.opaque or self.bucket.dtype == torch.float16:
            self.outcome.check((self.bucket.storage,))
        if on_reduced is not None and not self.failed:
            try:
                on_reduced(self.bucket)
            except BaseException as error:
                self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Note that the reduction raised on this rank."""
        self.close()
        self.failed = True
        where = ENCODE if self.stage == 0 else BETWEEN if self.due is not None else DECODE
        self.outcome.fail_bucket(error, where, self.bucket.index)

    def close(self) -> None:
        """Close the generator."""
        if self.generator is not None:
            self.generator.close()

    def _wait(self, pending: Stage, timeout: float | None, counters: Counters) -> None:
        begun = time.perf_counter()
        with _profiled(self.outcome.name, "wait", self.stage):
            pending.wait(timeout)
        self.pending = None  # after a failed wait the step is dropped, and messages of the stage may still write
        ended = time.perf_counter()
        counters.wait_seconds += ended - begun
        if counters.trace is not None:
            counters.trace.waited(self.number, self.bucket, self.stage - 1, begun, ended)
        reduced, pending.reduced = pending.reduced, []  # buckets may share the stage, and one check is enough
        self.outcome.check(reduced)

    def _resume(self, counters: Counters) -> tuple[Request, ...] | None:
        """Return the reduction's next requests, checked against the plan; ``None`` after the last stage."""
        assert self.generator is not None  # noqa: S101 - otherwise it has failed
        expected, name = self.due, self.outcome.name
        begun = time.perf_counter()
        with _profiled(name, "stage", self.stage):
            try:
                requests = as_tuple(next(self.generator))
            except StopIteration:
                if expected is None:
                    ended = time.perf_counter()
                    counters.decode_seconds += ended - begun
                    if counters.trace is not None:
                        counters.trace.computed(self.number, self.bucket, self.stage, begun, ended, decode=True)
                    return None
                raise HookResultError(
                    f"{name} ended after {self.stage} stages, but its plan has {len(self.plan.plan)}. A reduction must yield "
                    "the same requests for the same layout and step"
                ) from None
        ended = time.perf_counter()
        counters.encode_seconds += ended - begun
        if counters.trace is not None:
            counters.trace.computed(self.number, self.bucket, self.stage, begun, ended, decode=False)
        found = tuple(r.plan() for r in requests)
        if found != expected:
            raise HookResultError(
                f"{name}, stage {self.stage} of bucket {self.bucket.index}: asked for {found}, but its plan says "
                f"{expected}. Requests may depend on the layout and the step only"
            )
        return requests


@dataclass(slots=True)
class RequestBatch:
    """Requests of several buckets that become one stage.

    Attributes:
        requests: the requests, in the order in which the buckets made them.
        runs: the buckets.
    """

    requests: list[Request] = field(default_factory=list)
    runs: list[BucketRun] = field(default_factory=list)

    def add(self, run: BucketRun, requests: tuple[Request, ...]) -> None:
        """Add the requests of a bucket's next stage."""
        self.requests.extend(requests)
        self.runs.append(run)
        run.stage += 1

    def enough(self, tuning: CpuTuning) -> bool:
        """True if these first stages are worth a message."""
        return sum(run.plan.first_bytes for run in self.runs) >= tuning.coalesced_bytes

    def start(self, sender: Sender) -> None:
        """Start all requests as one stage and empty the batch."""
        if not self.runs:
            return
        begun = time.perf_counter()
        requests, runs = tuple(self.requests), self.runs
        self.requests, self.runs = [], []
        traffic, trace = sender.counters.traffic, sender.counters.trace
        traffic.rounds += bool(requests)
        if trace is not None:
            trace.sending([(run.number, run.bucket, run.stage - 1) for run in runs])
        first = runs[0]
        # The average of a bucket with one stage equals DDP's to the bit, so ranks add in DDP's order.
        any_order = not any(run.plan.one_stage for run in runs)
        with _profiled(first.outcome.name, "start", first.stage):
            owner, newest = (first.number, first.stage), runs[-1].bucket.is_last
            stage = Stage(sender.transport, sender.scratch, owner, any_order, sender.tuning, newest)
            for run in runs:
                run.pending = stage
            stage.start(requests)
        if stage.error is not None:
            first.outcome.fail_bucket(stage.error, BETWEEN, first.bucket.index)
        traffic.sent(stage.wire_bytes, stage.between_bytes)
        ended = time.perf_counter()
        sender.counters.encode_seconds += ended - begun
        if trace is not None:
            trace.started(begun, ended)


def _profiled(reduction: str, what: str, stage: int) -> AbstractContextManager[Any]:
    """Return the profiler range ``commhooks::REDUCTION::WHATn``.

    Without a profiler it returns an empty context, because an unused ``record_function`` costs more than the start of a
    collective.
    """
    on_any_thread = getattr(torch.autograd.profiler, "_is_profiler_enabled", False)
    on = on_any_thread or _on_this_thread()
    return torch.profiler.record_function(f"commhooks::{reduction}::{what}{stage}") if on else _OFF
