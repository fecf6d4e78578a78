"""A bucket under way: its generator, its plan, and the stage that it waits for."""

import time
from collections.abc import Callable

import torch

from commhooks.bucket import Bucket, BucketLayout
from commhooks.engine.counters import Counters
from commhooks.engine.outcome import StepOutcome
from commhooks.engine.profiling import profiled
from commhooks.engine.schedule import BucketPlan
from commhooks.engine.stage import Stage
from commhooks.engine.status import BETWEEN, DECODE, ENCODE
from commhooks.engine.void_requests import make_void, void_requests
from commhooks.errors import HookResultError
from commhooks.reduction import Stages
from commhooks.requests import Request, StagePlan, as_tuple

_NOTHING = BucketPlan((), BucketLayout((), 0, torch.float32, "cpu"))


class BucketRun:
    """A bucket whose generator has not ended.

    Args:
        slot: its number in the step.
        bucket: the bucket.
        outcome: of the step.

    Attributes:
        plan: what it goes through.
        stages: the generator, as soon as there is one.
        stage: how many stages it has asked for.
        pending: the last of them, until it is done.
        failed: whether its reduction raised here: it sends NaN until the plan ends, or the others would wait.
        done: whether it has ended.
    """

    __slots__ = ("bucket", "done", "failed", "outcome", "pending", "plan", "slot", "stage", "stages")

    def __init__(self, slot: int, bucket: Bucket, outcome: StepOutcome) -> None:
        self.slot, self.bucket, self.outcome = slot, bucket, outcome
        self.plan = _NOTHING
        self.stages: Stages | None = None
        self.stage = 0
        self.pending: Stage | None = None
        self.failed = self.done = False

    @property
    def due(self) -> StagePlan | None:
        """What it has to ask for next; ``None`` when it has asked for everything."""
        return self.plan.plan[self.stage] if self.stage < len(self.plan.plan) else None

    def advance(self, timeout: float | None, counters: Counters) -> tuple[Request, ...] | None:
        """Wait for the pending stage and resume the generator; what it asks for next, ``None`` when it has ended.

        Errors of the reduction are noted in the outcome; those of the transport are raised.
        """
        if self.pending is not None:
            self._complete(self.pending, timeout, counters)
        if not self.failed:
            try:
                return self._resume(counters)
            except BaseException as error:  # Ctrl-C too: raised in the hook it would leave DDP and the peers stuck
                self.fail(error)
        due = self.due
        return None if due is None else void_requests(due, self.outcome.world_size, self.bucket.device)

    def end(self, use: Callable[[Bucket], None] | None) -> None:
        """It has asked for everything, and everything has come.

        Args:
            use: who uses each average at once, if somebody does: called with the bucket unless it failed.
        """
        self.done = True
        if self.failed:  # half decoded, perhaps: nobody may take it for an average
            make_void(self.bucket.storage)
        # A finite P and Q may overflow when multiplied out in fp16; opaque payloads show nothing before decoding.
        if self.plan.opaque or self.bucket.dtype == torch.float16:
            self.outcome.look((self.bucket.storage,))
        if use is not None and not self.failed:
            try:
                use(self.bucket)
            except BaseException as error:
                self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Its reduction raised on this rank."""
        self.close()
        self.failed = True
        self.outcome.report(error, self._where(), self.bucket.index)

    def close(self) -> None:
        """End the generator."""
        if self.stages is not None:
            self.stages.close()

    def _where(self) -> int:
        return ENCODE if self.stage == 0 else BETWEEN if self.due is not None else DECODE

    def _complete(self, pending: Stage, timeout: float | None, counters: Counters) -> None:
        self.pending = None
        begun = time.perf_counter()
        with profiled(self.outcome.name, "wait", self.stage):
            pending.wait(timeout)
        counters.wait_seconds += time.perf_counter() - begun
        reduced, pending.reduced = pending.reduced, []  # buckets of one round share a stage, and look once
        self.outcome.look(reduced)

    def _resume(self, counters: Counters) -> tuple[Request, ...] | None:
        """The generator's next requests, checked against the plan; ``None`` when it ended."""
        assert self.stages is not None  # noqa: S101 - it has failed otherwise
        expected, name = self.due, self.outcome.name
        begun = time.perf_counter()
        with profiled(name, "stage", self.stage):
            try:
                requests = as_tuple(next(self.stages))
            except StopIteration:
                if expected is None:
                    counters.decode_seconds += time.perf_counter() - begun
                    return None
                raise HookResultError(
                    f"{name} ended after {self.stage} stages; its plan has {len(self.plan.plan)}"
                ) from None
        counters.encode_seconds += time.perf_counter() - begun
        found = tuple(r.plan() for r in requests)
        if found != expected:
            raise HookResultError(
                f"{name}, stage {self.stage} of bucket {self.bucket.index}: asked for {found}, but its plan says "
                f"{expected}. Requests may depend on the layout and the step only"
            )
        return requests
