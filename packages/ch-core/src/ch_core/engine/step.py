"""A step and its buckets: each bucket has a generator, its plan, and the batch that carries its newest stage."""

import math
import time
from collections.abc import Callable
from zlib import crc32

import torch

from ch_core.bucket import Bucket, BucketLayout
from ch_core.engine.messages import Batch, Messenger, profiled
from ch_core.engine.outcome import BETWEEN, DECODE, ENCODE, StepOutcome
from ch_core.engine.schedule import BucketPlan, Schedule
from ch_core.engine.stats import Counters
from ch_core.errors import HookResultError
from ch_core.reduction import Stages
from ch_core.requests import AllGather, AllReduce, AllToAll, ReduceScatter, Request, StagePlan, as_tuple
from ch_core.topology import Topology


class BucketRun:
    """One bucket during its reduction.

    Args:
        number: its number among the buckets in flight.
        bucket: the bucket.
        outcome: outcome of its step.
        plan: the stages that it passes.
        generator: the running reduction; ``None`` if the reduction raised before its first stage.

    Attributes:
        stage: number of stages that it has asked for.
        pending: the batch of the newest of these stages, until it is done.
        failed: True if the reduction raised on this rank. It then sends NaN until the plan ends, so that no peer waits.
        done: True if it has passed all stages.
    """

    __slots__ = ("bucket", "done", "failed", "generator", "number", "outcome", "pending", "plan", "stage")

    def __init__(
        self, number: int, bucket: Bucket, outcome: StepOutcome, plan: BucketPlan, generator: Stages | None
    ) -> None:
        self.number, self.bucket, self.outcome, self.plan, self.generator = number, bucket, outcome, plan, generator
        self.stage = 0
        self.pending: Batch | None = None
        self.failed = self.done = False

    @property
    def due(self) -> StagePlan | None:
        """The requests of its next stage; ``None`` after the last one."""
        return self.plan.plan[self.stage] if self.stage < len(self.plan.plan) else None

    def advance(self, messenger: Messenger, schedule: Schedule) -> tuple[Request, ...] | None:
        """Wait for the pending batch and resume the reduction.

        Errors of the reduction are noted in the outcome. Errors of the transport are raised.

        Args:
            messenger: carries the batch.
            schedule: knows the nodes of the ranks.

        Returns:
            The requests of the next stage; ``None`` after the last one.
        """
        if self.pending is not None:
            self._wait(self.pending, messenger)
        if not self.failed:
            try:
                return self._resume(messenger.counters)
            except BaseException as error:  # Ctrl-C too: raised in the hook it would leave DDP and the peers stuck
                self.fail(error)
        due, world_size = self.due, self.outcome.world_size
        return None if due is None else void_requests(due, world_size, self.bucket.device, schedule.topology)

    def complete(self, on_reduced: Callable[[Bucket], None] | None) -> None:
        """Mark the run done after its last stage, and give the average to a callback.

        Args:
            on_reduced: called with the bucket, unless the reduction failed.
        """
        self.done = True
        if self.failed:  # the bucket may be half decoded, and must not pass for an average
            fill_nan(self.bucket.storage)
        # A finite P and Q may overflow when multiplied in fp16. Packed payloads show NaN and Inf only after decoding.
        if self.plan.opaque or self.bucket.storage.dtype == torch.float16:
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

    def _wait(self, pending: Batch, messenger: Messenger) -> None:
        begun = time.perf_counter()
        with profiled(self.outcome.name, "wait", self.stage):
            pending.wait(messenger.timeout)
        self.pending = None
        ended, counters = time.perf_counter(), messenger.counters
        counters.wait_seconds += ended - begun
        if counters.trace is not None:
            counters.trace.waited(self.number, self.bucket, self.stage - 1, begun, ended)
        if pending.reduced:
            self.outcome.check(pending.reduced)
            pending.reduced = []  # buckets may share the batch, and one check is enough

    def _resume(self, counters: Counters) -> tuple[Request, ...] | None:
        """Return the reduction's next requests, checked against the plan; ``None`` after the last stage."""
        assert self.generator is not None  # noqa: S101 - otherwise it has failed
        expected, name = self.due, self.outcome.name
        begun = time.perf_counter()
        with profiled(name, "stage", self.stage):
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


class Step:
    """One step of an engine, from its first bucket to commit or rollback.

    Args:
        outcome: what became of it on all ranks.
        participating: True if this rank contributes data. Otherwise it cannot know if the step was used.
        messenger: carries its messages.
        keep: True if buckets stay readable until the next step begins.

    Attributes:
        first_stages: collects first stages that are not worth a message yet.
        in_flight: runs that are not done.
        count: number of the next run. Runs in flight have different numbers.
        layouts: layouts of all buckets.
        digest: digest of the layouts. Ranks with different layouts have, with few exceptions, different digests.
        kept: buckets that hold their average, if they are kept.
        submitted: buckets in which a late failure must still write NaN when the step ends.
    """

    def __init__(self, outcome: StepOutcome, participating: bool, messenger: Messenger, keep: bool = False) -> None:
        self.outcome, self.participating, self.keep = outcome, participating, keep
        self._messenger = messenger
        self.first_stages = Batch(messenger)
        self.in_flight: list[BucketRun] = []
        self.count = self.digest = 0
        self.layouts: list[BucketLayout] = []
        self.kept: list[Bucket] = []
        self.submitted: list[Bucket] = []

    def add(self, bucket: Bucket, plan: BucketPlan, generator: Stages | None) -> BucketRun:
        """Add the next bucket."""
        run = BucketRun(self.count, bucket, self.outcome, plan, generator)
        self.count += 1
        self.layouts.append(bucket.layout)
        self.digest = crc32(bucket.layout.digest, self.digest)
        self.in_flight.append(run)
        return run

    def take_first_stages(self) -> Batch:
        """Return the collected first stages, and collect into a new batch from now on."""
        batch, self.first_stages = self.first_stages, Batch(self._messenger)
        return batch

    def drop_done(self) -> None:
        """Remove runs that are done."""
        if self.keep:
            self.kept += [run.bucket for run in self.in_flight if run.done]
        self.in_flight = [run for run in self.in_flight if not run.done]

    def restart_numbers(self) -> None:
        """Number the next run 0. No run is in flight, so it may use the scratch of the first one."""
        self.submitted.clear()  # the wrapper owns their memory
        self.count = 0

    def abandon(self) -> None:
        """Close all runs, because the step never finishes. Its messages have been dropped."""
        for run in self.in_flight:
            run.close()
        self.in_flight = []
        self.take_first_stages()  # a later call would send them, and no peer awaits requests of a dropped step
        self.restart_numbers()
        self.outcome.abandon()


def void_requests(
    planned: StagePlan, world_size: int, device: torch.device, topology: Topology | None = None
) -> tuple[Request, ...]:
    """Return the requests of one stage of a failed reduction, filled with NaN.

    Their results are invalid on all ranks. On a GPU the ranks learn of the failure only after the optimizer's step. Until
    then NaN makes a ``GradScaler`` skip it. Integers and packed bytes become zeros.

    Example:
        >>> from ch_core import RequestPlan
        >>> void_requests((RequestPlan("all_reduce", 2, torch.float32),), 2, torch.device("cpu"))[0].tensor
        tensor([nan, nan])
        >>> void_requests((RequestPlan("all_gather", 4, torch.uint8),), 2, torch.device("cpu"))[0].input
        tensor([0, 0], dtype=torch.uint8)
    """
    made: list[Request] = []
    for p in planned:
        void = torch.zeros(p.numel, dtype=p.dtype, device=device)
        fill_nan(void)
        part = p.numel // (world_size if topology is None else topology.size(p.scope))
        if p.kind == "all_reduce":
            made.append(AllReduce(void, p.op, p.wire, scope=p.scope))
        elif p.kind == "reduce_scatter":
            made.append(ReduceScatter(void, void[:part].clone(), p.op, p.wire, p.scope))
        elif p.kind == "all_gather":
            made.append(AllGather(void[:part].clone(), void, wire=p.wire, scope=p.scope))
        else:
            made.append(AllToAll(void, torch.empty_like(void), wire=p.wire, scope=p.scope))
    return tuple(made)


def fill_nan(tensor: torch.Tensor) -> None:
    """Fill a tensor with NaN, if its dtype has NaN."""
    if tensor.is_sparse:
        tensor.mul_(math.nan)
    elif tensor.is_floating_point() or tensor.is_complex():
        tensor.fill_(math.nan)
