"""The engine: runs many reductions at once, starting every collective in one order on every rank.

The lockstep rule, independent of timing: when bucket *b* arrives, start its first stage, then advance each bucket
that is at least ``lag`` older by one stage, in bucket order; on the last bucket, drain. Everything happens on the
thread that calls the hook, and every collective is started before the last bucket's call returns.

One status message per step (an all-reduced vector) says on which ranks a reduction raised and whether anything
reduced was not finite; from it all ranks decide alike whether the step is committed.
"""

import logging
import math
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

import torch

from commhooks.bucket import Bucket, BucketLayout
from commhooks.combine import plain
from commhooks.errors import CommHooksError, HookResultError, RemoteHookError
from commhooks.reduction import Reduction, Stages, StepContext
from commhooks.requests import AllGather, AllReduce, AllToAll, ReduceScatter, Request, StagePlan, as_tuple
from commhooks.scratch import Scratch
from commhooks.state import HookState
from commhooks.transport import Stage, Traffic, Transport

log = logging.getLogger("commhooks")

ENCODE, BETWEEN, DECODE = 1.0, 2.0, 3.0  # where a reduction raised; the codes of the status message
_WHERE = {ENCODE: "before its first collective", BETWEEN: "between collectives", DECODE: "after its last collective"}
_MESSAGE_BYTES = 512


@dataclass(slots=True)
class Live:
    """A bucket whose generator has not ended."""

    slot: int
    bucket: Bucket
    stages: Stages
    plan: tuple[StagePlan, ...]
    stage: int = 0
    pending: Stage | None = None
    ghost: bool = False
    done: bool = False


@dataclass(slots=True)
class Counters:
    """Cumulative figures of one engine."""

    steps: int = 0
    compressed_steps: int = 0
    hook_seconds: float = 0.0
    wait_seconds: float = 0.0
    traffic: Traffic = field(default_factory=Traffic)

    def as_dict(self) -> dict[str, float]:
        return {
            "steps": float(self.steps),
            "compressed_steps": float(self.compressed_steps),
            "payload_bytes": self.traffic.payload_bytes,
            "wire_bytes": self.traffic.wire_bytes,
            "rounds": float(self.traffic.rounds),
            "hook_seconds": self.hook_seconds,
            "wait_seconds": self.wait_seconds,
        }


class Engine:
    """Drives one reduction over one group of ranks.

    Args:
        reduction: what to run on every bucket.
        transport: where its collectives happen.
        state: what the reduction remembers; a fresh one if not given.
        lag: how much older than the arriving bucket another must be to be advanced; ``math.inf`` leaves all
            later stages to the drain.
        timeout: seconds that one collective may take on the host.
    """

    def __init__(
        self,
        reduction: Reduction,
        transport: Transport,
        state: HookState | None = None,
        *,
        lag: float = 1,
        timeout: float | None = 60.0,
    ) -> None:
        if lag < 1:
            raise ValueError(f"lag must be at least 1, got {lag}")
        self.reduction, self.transport, self.lag, self.timeout = reduction, transport, lag, timeout
        self.state = state if state is not None else HookState()
        self.counters = Counters()
        self.scratch = Scratch()
        self.failure: BaseException | None = None  # the transport is lost: nothing can be started any more
        self.participating = True
        self._plans: dict[tuple[BucketLayout, Hashable], tuple[StagePlan, ...]] = {}
        self._live: list[Live] = []
        self._slots = 0
        self._open = False
        self._error: tuple[BaseException, float] | None = None
        self._sums: list[torch.Tensor] = []
        self._verdict: Verdict | None = None
        self._late: BaseException | None = None
        self._device = torch.device("cpu")
        self._veto = False
        self._bytes = (0.0, 0.0)
        self._rounds = 0

    # -- one step

    @property
    def in_step(self) -> bool:
        """Whether buckets of a step have arrived and the step has not ended."""
        return self._open

    def submit(self, bucket: Bucket) -> None:
        """Take the next bucket of the step: start it, advance the older ones.

        Errors of the reduction are kept for :meth:`finish`; errors of the transport are raised.
        """
        begun = time.perf_counter()
        if not self._open:
            self._begin()
        live = self._new(bucket)
        self._live.append(live)
        self._advance(live)
        for older in self._live:
            if live.slot - older.slot >= self.lag:
                self._advance(older)
        self._live = [one for one in self._live if not one.done]
        self.counters.hook_seconds += time.perf_counter() - begun

    def finish(self, *, outside: BaseException | None = None) -> BaseException | None:
        """End the step: drain every bucket, exchange the status, and return the error to raise, the same decision
        on every rank.

        Args:
            outside: an error of this rank that happened outside the reduction, to be made known to the others.
        """
        begun = time.perf_counter()
        if outside is not None and self._error is None:
            self._error = (outside, ENCODE)
        while self._live:
            for live in self._live:
                self._advance(live)
            self._live = [one for one in self._live if not one.done]
        error = self._exchange()
        self._open = False
        self._slots = 0
        self.counters.steps += 1
        gradient, sent = self._bytes[0], self.counters.traffic.trip_bytes - self._bytes[1]
        self.counters.compressed_steps += 0 < sent < 2 * gradient  # less than a plain all-reduce sends
        self.counters.hook_seconds += time.perf_counter() - begun
        return error

    def run(self, bucket: Bucket) -> None:
        """The immediate driver: run one bucket from its first stage to its end (FSDP2, whose calls stand alone)."""
        self.submit(bucket)
        begun = time.perf_counter()
        while self._live:
            for live in self._live:
                self._advance(live)
            self._live = [one for one in self._live if not one.done]
        self.counters.hook_seconds += time.perf_counter() - begun

    # -- the step's verdict

    def settle(self) -> bool | None:
        """Commit or roll back the last finished step, if that is still open; returns whether it was committed."""
        if self._verdict is None:
            return None
        good = self._verdict.good() and not self._veto
        self._verdict, self._veto = None, False
        if good:
            self.state.commit()
        else:
            self.state.rollback()
        return good

    def rollback(self) -> None:
        """The optimizer did not use the last finished step: as if it had never been."""
        if self._verdict is not None:
            self._veto = True

    def abandon(self) -> None:
        """Forget a step that will never finish (a backward that raised half way), and what it staged.

        Collectives that this rank started and others did not are beyond help; the transport's own deadline ends
        them.
        """
        for live in self._live:
            live.stages.close()
        self._live.clear()
        self._open, self._slots, self._error = False, 0, None
        self._sums.clear()
        self.state.rollback()

    # -- inside

    def _begin(self) -> None:
        if self.failure is not None:
            raise self.failure
        self._late = self._judge() if self._verdict is not None and not self._verdict.judged else None
        self.settle()
        self._open, self._slots, self._error = True, 0, None
        self._sums.clear()
        self._bytes = (0.0, self.counters.traffic.trip_bytes)
        self._rounds = self.counters.traffic.rounds

    def _new(self, bucket: Bucket) -> Live:
        ctx = StepContext(
            self.transport.rank,
            self.transport.world_size,
            self.state.step,
            state=self.state,
            scratch=self.scratch,
            owner=self._slots,
            participating=self.participating,
            shared=self.reduction.shared_fields,
        )
        self._bytes = (self._bytes[0] + bucket.layout.size * bucket.dtype.itemsize, self._bytes[1])
        self._device = bucket.device
        try:
            live = Live(self._slots, bucket, self.reduction.start(bucket, ctx), self.plan(bucket.layout, ctx))
        except Exception as error:  # the same on every rank: it follows from layout and step
            live = Live(self._slots, bucket, plain(bucket), ())
            self._fail(live, error)
        self._slots += 1
        return live

    def plan(self, layout: BucketLayout, ctx: StepContext | None = None) -> tuple[StagePlan, ...]:
        """The stages that a bucket of this layout goes through at the present step."""
        if ctx is None:
            ctx = StepContext(self.transport.rank, self.transport.world_size, self.state.step)
        key = (layout, self.reduction.phase(ctx.step))
        if key not in self._plans:
            self._plans[key] = self.reduction.plan(layout, ctx)
        return self._plans[key]

    def _advance(self, live: Live) -> None:
        """One stage further: wait for the pending one, resume the generator, start the next."""
        if live.pending is not None:
            self._complete(live)
        requests: tuple[Request, ...] = ()
        if not live.ghost:
            try:
                requests = self._resume(live)
            except Exception as error:
                self._fail(live, error)
        if live.ghost:
            requests = self._ghost(live)
        if not requests:
            live.done = True
            return
        for planned in live.plan[live.stage]:
            self.counters.traffic.add(planned, self.transport.world_size)
        self.counters.traffic.rounds += 1
        live.stage += 1
        live.pending = Stage(self.transport, self.scratch, live.slot)
        with torch.profiler.record_function(f"commhooks::{self.reduction.name}::start{live.stage}"):
            self._guarded(lambda stage: stage.start(requests), live.pending)

    def _resume(self, live: Live) -> tuple[Request, ...]:
        """The generator's next requests, checked against the plan; ``()`` when it ended."""
        expected = live.plan[live.stage] if live.stage < len(live.plan) else None
        with torch.profiler.record_function(f"commhooks::{self.reduction.name}::stage{live.stage}"):
            try:
                requests = as_tuple(next(live.stages))
            except StopIteration:
                if expected is None:
                    return ()
                raise HookResultError(
                    f"{self.reduction.name} ended after {live.stage} stages; its plan has {len(live.plan)}"
                ) from None
        found = tuple(r.plan() for r in requests)
        if found != expected:
            raise HookResultError(
                f"{self.reduction.name}, stage {live.stage} of bucket {live.bucket.index}: asked for {found}, but its "
                f"plan says {expected}. Requests may depend on the layout and the step only"
            )
        return requests

    def _complete(self, live: Live) -> None:
        pending, live.pending = live.pending, None
        assert pending is not None  # noqa: S101 - for the type checker
        begun = time.perf_counter()
        with torch.profiler.record_function(f"commhooks::{self.reduction.name}::wait{live.stage}"):
            self._guarded(lambda stage: stage.wait(self.timeout), pending)
        self.counters.wait_seconds += time.perf_counter() - begun
        if self.reduction.fields:
            self._sums.extend(_sum(t) for t in pending.reduced if t.is_floating_point())

    def _guarded(self, action: Callable[[Stage], object], stage: Stage) -> None:
        """Run something of the transport; when it fails the engine is dead, because nobody knows what the others
        received.
        """
        try:
            action(stage)
        except CommHooksError as error:
            self.failure = error
            self.abandon()
            self.transport.abort()
            raise

    # -- failure of a reduction: the ghost

    def _fail(self, live: Live, error: BaseException) -> None:
        where = ENCODE if live.stage == 0 else BETWEEN if live.stage < len(live.plan) else DECODE
        log.error(
            "[rank %d] %s raised %s of bucket %d",
            self.transport.rank,
            self.reduction.name,
            _WHERE[where],
            live.bucket.index,
        )
        live.stages.close()
        live.ghost = True
        if self._error is None:
            self._error = (error, where)

    def _ghost(self, live: Live) -> tuple[Request, ...]:
        """Zeros in the place of the requests that the failed generator owes the other ranks."""
        if live.stage >= len(live.plan):
            return ()
        made: list[Request] = []
        device = live.bucket.device
        world = self.transport.world_size
        for p in live.plan[live.stage]:
            zeros = torch.zeros(p.numel, dtype=p.dtype, device=device)
            if p.kind == "all_reduce":
                made.append(AllReduce(zeros, p.op, p.wire))
            elif p.kind == "reduce_scatter":
                made.append(ReduceScatter(zeros, zeros[: p.numel // world].clone(), p.op, p.wire))
            elif p.kind == "all_gather":
                made.append(AllGather(zeros[: p.numel // world].clone(), zeros))
            else:
                made.append(AllToAll(zeros, torch.empty_like(zeros)))
        return tuple(made)

    # -- status

    def _exchange(self) -> BaseException | None:
        """All-reduce ``[error code of rank 0, ..., of rank W-1, finite?]`` and judge the step by it."""
        world, rank = self.transport.world_size, self.transport.rank
        status = torch.zeros(world + 1, device=self._device)
        if self._error is not None:
            status[rank] = self._error[1]
        if self._sums:
            status[world] = torch.stack(self._sums).sum().isfinite().logical_not()
        self._sums.clear()
        if world > 1 and self.counters.traffic.rounds > self._rounds:  # a step without collectives sends no status
            stage = Stage(self.transport, self.scratch, "status")
            self._guarded(lambda s: s.start((AllReduce(status, "sum"),)), stage)
            self._guarded(lambda s: s.wait(self.timeout), stage)
        self._verdict = Verdict(status)
        late, self._late = self._late, None
        return late if status.is_cuda else self._judge()

    def _judge(self) -> BaseException | None:
        """The error that this rank raises for the last step, if any rank failed."""
        assert self._verdict is not None  # noqa: S101
        self._verdict.judged = True
        codes = self._verdict.codes()
        failed = {r: code for r, code in enumerate(codes) if code}
        if not failed:  # over a manager nobody hears what a healing member says; it knows its own error all the same
            return self._error[0] if self._error is not None else None
        texts = self._texts(failed)
        if self._error is not None:
            error, self._error = self._error[0], None
            return error
        lines = "; ".join(f"rank {r} {_WHERE.get(code, '')}: {texts.get(r, '?')}" for r, code in failed.items())
        return RemoteHookError(
            f"{self.reduction.name} raised on another rank, so this step's gradients are not valid on any rank. {lines}"
        )

    def _texts(self, failed: dict[int, float]) -> dict[int, str]:
        """What the failing ranks have to say: fixed-size messages, exchanged only after a failure."""
        world = self.transport.world_size
        if world == 1:
            return {}
        mine = b""
        if self._error is not None:
            mine = f"{type(self._error[0]).__name__}: {self._error[0]}".encode()[:_MESSAGE_BYTES]
        text = torch.tensor(list(mine.ljust(_MESSAGE_BYTES, b"\0")), dtype=torch.uint8, device=self._device)
        everyone = torch.empty(world * _MESSAGE_BYTES, dtype=torch.uint8, device=self._device)
        stage = Stage(self.transport, self.scratch, "text")
        self._guarded(lambda s: s.start((AllGather(text, everyone),)), stage)
        self._guarded(lambda s: s.wait(self.timeout), stage)
        rows = everyone.view(world, _MESSAGE_BYTES)
        return {r: bytes(rows[r].tolist()).rstrip(b"\0").decode(errors="replace") for r in failed}


class Verdict:
    """The all-reduced status of a step; on CUDA read only when it is needed, at the next step."""

    def __init__(self, status: torch.Tensor) -> None:
        self._status: torch.Tensor | None = status
        self._event: torch.cuda.Event | None = None
        if status.is_cuda:
            host = torch.empty(status.shape, pin_memory=True)
            host.copy_(status, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
            self._status = host
        self._values: list[float] | None = None
        self.judged = False

    def _read(self) -> list[float]:
        if self._values is None:
            if self._event is not None:
                self._event.synchronize()
            assert self._status is not None  # noqa: S101
            self._values = self._status.tolist()
            self._status = None
        return self._values

    def codes(self) -> list[float]:
        return self._read()[:-1]

    def good(self) -> bool:
        """No rank failed and everything reduced was finite."""
        return not any(self._read()) and math.isfinite(sum(self._read()))


def _sum(tensor: torch.Tensor) -> torch.Tensor:
    """A finite number if all are finite; 16-bit sums would overflow, so they are made in fp32."""
    return tensor.sum(dtype=torch.float32 if tensor.dtype.itemsize < 4 else None).float()
