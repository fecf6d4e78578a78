"""The one way from an engine to its transport: every stage, the status and the engine's own short messages."""

import time
from collections.abc import Hashable
from dataclasses import dataclass, field

import torch

from commhooks.bucket import BucketLayout
from commhooks.engine.bucket_run import BucketRun
from commhooks.engine.counters import Counters
from commhooks.engine.outcome import StepOutcome
from commhooks.engine.profiling import profiled
from commhooks.engine.schedule import TUNED, BucketPlan, CpuTuning
from commhooks.engine.stage import Stage
from commhooks.engine.status import BETWEEN
from commhooks.reduction import Reduction, StepContext
from commhooks.requests import AllGather, Request
from commhooks.scratch import Scratch
from commhooks.transport.base import Transport


@dataclass(slots=True)
class RequestBatch:
    """What buckets have asked for that has not been started yet.

    Attributes:
        requests: in the order in which they were made.
        buckets: who made them.
    """

    requests: list[Request] = field(default_factory=list)
    buckets: list[BucketRun] = field(default_factory=list)

    def add(self, bucket: BucketRun, requests: tuple[Request, ...]) -> None:
        """What ``bucket`` asks for in its next stage."""
        self.requests.extend(requests)
        self.buckets.append(bucket)
        bucket.stage += 1

    def enough(self, tuning: CpuTuning) -> bool:
        """Whether these first stages are worth a message."""
        return sum(bucket.plan.volumes[0][0] for bucket in self.buckets) >= tuning.coalesced_bytes


class Sender:
    """Starts what is asked for.

    Args:
        transport: where it happens.
        counters: of the engine.
        timeout: seconds that one collective may take on the host.
        tuning: how a CPU's messages are sent.
        sends_status: whether the ranks tell one another how a step went.

    Attributes:
        scratch: for what is merged and cast.
        held: first stages that are not worth a message yet.
        device: where the last bucket was.
    """

    def __init__(
        self,
        transport: Transport,
        counters: Counters,
        timeout: float | None,
        tuning: CpuTuning = TUNED,
        *,
        sends_status: bool = True,
    ) -> None:
        self.transport, self.counters, self.timeout, self.tuning = transport, counters, timeout, tuning
        self.sends_status = sends_status
        self.scratch = Scratch()
        self.held = RequestBatch()
        self.device = torch.device("cpu")
        self._plans: dict[tuple[BucketLayout, int, Hashable], BucketPlan] = {}

    def plan_of(self, reduction: Reduction, layout: BucketLayout, ctx: StepContext) -> BucketPlan:
        """What a bucket of this layout goes through in a step."""
        key = (layout, ctx.world_size, reduction.phase(ctx.step))  # over a manager ranks come and go
        if key not in self._plans:
            self._plans[key] = BucketPlan(reduction.plan(layout, ctx), layout, self.tuning)
        return self._plans[key]

    def start(self, batch: RequestBatch) -> None:
        """Start what has been asked for as one stage; the batch is empty afterwards."""
        if not batch.buckets:
            return
        begun = time.perf_counter()
        requests, buckets = tuple(batch.requests), batch.buckets
        batch.requests, batch.buckets = [], []
        self.counters.traffic.rounds += bool(requests)
        first = buckets[0]
        # The average of a bucket that ends at once is DDP's to the bit: it is added up in DDP's order.
        any_order = not any(bucket.plan.ends_at_once for bucket in buckets)
        with profiled(first.outcome.name, "start", first.stage):
            owner, newest = (first.slot, first.stage), buckets[-1].bucket.is_last
            stage = Stage(self.transport, self.scratch, owner, any_order, self.tuning, newest)
            for bucket in buckets:
                bucket.pending = stage
            stage.start(requests)
            if stage.error is not None:
                first.outcome.report(stage.error, BETWEEN, first.bucket.index)
        self.counters.traffic.wire_bytes += stage.wire_bytes
        self.counters.encode_seconds += time.perf_counter() - begun

    def send_status(self, outcome: StepOutcome, clock: int | None) -> None:
        """Send this rank's part of a step's outcome; a step without collectives sends none, as nobody else takes part.

        Args:
            outcome: on the step.
            clock: steps behind this rank; ``None`` if it does not count.
        """
        together = self.sends_status and self.transport.world_size > 1 and self.counters.communicated
        outcome.send(clock, self.device, self.post if together else None)

    def post(self, request: Request) -> Stage:
        """Start a message of the engine's own."""
        stage = Stage(self.transport, self.scratch, "status", True, self.tuning).start((request,))
        self.counters.traffic.wire_bytes += stage.wire_bytes
        return stage

    def carry_out(self, request: Request) -> None:
        """Send a message of the engine's own, and wait for it."""
        self.post(request).wait(self.timeout)

    def gather(self, mine: torch.Tensor) -> torch.Tensor:
        """Every rank's ``mine`` (n,), one row each: (world_size, n), on the CPU."""
        mine = mine.to(self.device)
        everyone = mine.new_empty(self.transport.world_size * mine.numel())
        self.carry_out(AllGather(mine, everyone))
        return everyone.view(self.transport.world_size, -1).cpu()

    def move(self, transport: Transport) -> None:
        """Go on over another group of ranks."""
        self.transport = transport
        self._plans.clear()  # they may depend on the number of ranks

    def forget(self) -> None:
        """Hold nothing of a step that will never finish."""
        self.scratch = Scratch()  # the transport may still write to the old
        self.held = RequestBatch()
