"""The engine: runs many reductions at once, starting every collective in one order on every rank.

The lockstep rule, independent of timing: when bucket *b* arrives, start its first stage, then advance each bucket
that is at least ``lag`` older by one stage, in bucket order; on the last bucket, drain. What older buckets ask for at one
time travels as one stage. Everything is started on the thread that calls the hook, before its last call returns.

On a CPU a bucket with no later stage, or only small ones, waits for the drain, whatever its age: waiting for its
collective would hold up the backward, the threads that carry one take the cores from it, and hiding few bytes behind it
costs more than it saves. For the same reason a short first stage before such a one is started later: with those of the
next buckets, once they are worth a message. The plan decides, so all ranks decide alike. Only ending a bucket, which
starts nothing, is done at once where somebody uses each average.

One status message per step (an all-reduced vector) says on which ranks a reduction raised and whether anything
reduced was not finite; from it all ranks decide alike whether the step is committed. It follows the drain, or travels
beside the last messages where nothing is left to do but to wait for them.
"""

import logging
import time
from collections.abc import Callable, Hashable

import torch

from commhooks.bucket import Bucket, BucketLayout
from commhooks.combine import plain
from commhooks.counters import Counters
from commhooks.errors import CommHooksError, HookResultError, TransportError
from commhooks.ghost import ghost
from commhooks.live import Asked, Course, Live
from commhooks.profiling import profiled
from commhooks.reduction import Reduction, StepContext
from commhooks.requests import AllGather, Request, StagePlan, as_tuple
from commhooks.scratch import Scratch
from commhooks.state import HookState
from commhooks.status import BETWEEN, DECODE, ENCODE, WHERE, Exchange, Outside, Status, finiteness
from commhooks.transport import Stage, Transport
from commhooks.wire import delivers

log = logging.getLogger("commhooks")


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
        self.sends_status = True  # off, the messages are exactly those of DDP without a hook
        self.on_reduced: Callable[[Bucket], None] | None = None  # called with each bucket that holds its average
        self.outside: Outside | None = None  # says whether a finished step was used
        self.loss_scale: Callable[[], float] | None = None  # of the gradients of the step that begins
        self.keep_buckets = False  # whether the last step's buckets stay readable after it
        self.last: list[Bucket] = []
        self.layouts: list[BucketLayout] = []  # of the last step's buckets, in the order in which they came
        self._courses: dict[tuple[BucketLayout, Hashable], Course] = {}
        self._live: list[Live] = []
        self._held = Asked()  # first stages that are not worth a message yet
        self._slots = 0
        self.in_step = False  # whether buckets of a step have arrived and the step has not ended
        self._veto = False
        self._error: tuple[BaseException, int] | None = None
        self._sums: list[torch.Tensor | float] = []
        # Where members come and go, one more message under way keeps a group alive from which a peer has gone.
        self._delivers = delivers(reduction) and not transport.elastic
        self._status: Status | None = None  # of the last finished step, until it is settled
        self._unjudged: Status | None = None  # on CUDA, until somebody has to know
        self._late: BaseException | None = None
        self._device = torch.device("cpu")
        self.state.driven_by(self)

    # -- one step

    def submit(self, bucket: Bucket) -> None:
        """Take the next bucket of the step: start it, advance the older ones.

        Errors of the reduction are kept for :meth:`finish`; errors of the transport are raised.
        """
        begun = time.perf_counter()
        if not self.in_step:
            self._begin()
        live = self._new(bucket)
        self._live.append(live)
        if not live.course.gathers:
            self._start(self._held)
        self._ask([live], self._held)
        if not live.course.gathers or bucket.is_last or self._held.enough:
            self._start(self._held)
        due = [older for older in self._live if live.slot - older.slot >= self.lag]
        used = self.on_reduced is not None
        self._advance([older for older in due if not older.course.waits or (used and older.due is None)])
        self.counters.hook_seconds += time.perf_counter() - begun

    def finish(self, *, outside: BaseException | None = None) -> BaseException | None:
        """End the step: drain, exchange the status, return the error to raise: the same decision on every rank.

        Args:
            outside: an error of this rank that happened outside the reduction, to be made known to the others.
        """
        begun = time.perf_counter()
        if outside is not None and self._error is None:
            self._error = (outside, ENCODE)
        told = self._tell() if self._only_waits() else None
        self._drain()
        error = self._verdict(*(told or self._tell()))
        self.in_step, self._slots = False, 0
        self.counters.end(self.reduction.trips)
        self.counters.hook_seconds += time.perf_counter() - begun
        return error

    def run(self, bucket: Bucket) -> None:
        """The immediate driver: run one bucket from its first stage to its end (FSDP2, whose calls stand alone)."""
        self.submit(bucket)
        begun = time.perf_counter()
        self._drain()
        self._slots = 0  # nothing else is live: the next bucket may use the same scratch
        self.counters.hook_seconds += time.perf_counter() - begun

    def _drain(self) -> None:
        """Advance every live bucket to its end; the last, a stage behind, sends while the others work."""
        self._start(self._held)
        newest = self._slots - 1  # by number: which of the others have ended already may differ between ranks
        while self._live:
            self._advance([live for live in self._live if live.slot < newest])
            self._advance([live for live in self._live if live.slot == newest])

    # -- the step's verdict

    def settle(self, *, finally_: bool = False) -> bool | None:
        """Commit or roll back the last finished step, if that is still open; returns whether it was committed.

        Args:
            finally_: the next step begins, so what the optimizer has not used by now it has skipped. Otherwise the
                step stays open until the optimizer has decided.
        """
        if self._status is None:
            return None
        good = self._status.good() and not self._veto
        if good and self.outside is not None and self.participating:
            if not finally_ and not self.outside.decided():
                return None
            good = self.outside.used()
        self._status, self._veto = None, False
        if good:
            self.state.commit()
        else:
            self.state.rollback()
        return good

    def rollback(self) -> None:
        """The optimizer did not use the last finished step: as if it had never been."""
        if self._status is not None:
            self._veto = True

    def gather(self, mine: torch.Tensor) -> torch.Tensor:
        """Every rank's ``mine`` (1-D), one row each. Between steps, on all ranks alike."""
        mine = mine.to(self._device)
        everyone = mine.new_empty(self.transport.world_size * mine.numel())
        self._carry_out(AllGather(mine, everyone))
        return everyone.view(self.transport.world_size, -1).cpu()

    def move(self, transport: Transport) -> None:
        """Go on over another group of ranks, between steps. The state stays."""
        self.settle()
        self.transport, self.failure = transport, None
        self._courses.clear()

    def abandon(self) -> None:
        """Forget a step that will never finish (a backward that raised half way), and what it staged.

        Collectives that this rank started and others did not are beyond help; the transport's own deadline ends
        them.
        """
        self.scratch = Scratch()  # the transport may still write to the old
        for live in self._live:
            live.stages.close()
        self._live, self._held = [], Asked()
        self.in_step, self._slots, self._error = False, 0, None
        self._sums.clear()
        self.state.rollback()

    # -- inside

    def _begin(self) -> None:
        if self.failure is not None:
            raise self.failure
        self._late = self.judge()
        self.settle(finally_=True)
        if self.loss_scale is not None and self.reduction.fields:
            self.state.rescale(self.loss_scale())
        self.in_step, self._slots, self._error = True, 0, None
        self.last.clear()
        self.layouts.clear()
        self._sums.clear()
        self.counters.begin()

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
        self.counters.gradient_bytes += bucket.layout.size * bucket.dtype.itemsize
        self._device = bucket.device
        self.layouts.append(bucket.layout)
        try:
            live = Live(self._slots, bucket, self.reduction.start(bucket, ctx), self._course(bucket.layout, ctx))
        except Exception as error:  # the same on every rank: it follows from layout and step
            live = Live(self._slots, bucket, plain(bucket), Course((), bucket.layout))
            self._fail(live, error)
        self._slots += 1
        return live

    def plan(self, layout: BucketLayout) -> tuple[StagePlan, ...]:
        """The stages that a bucket of this layout goes through at the present step."""
        ctx = StepContext(self.transport.rank, self.transport.world_size, self.state.step)
        return self._course(layout, ctx).plan

    def _course(self, layout: BucketLayout, ctx: StepContext) -> Course:
        key = (layout, self.reduction.phase(ctx.step))
        if key not in self._courses:
            self._courses[key] = Course(self.reduction.plan(layout, ctx), layout)
        return self._courses[key]

    def _advance(self, lives: list[Live]) -> None:
        """Each one stage further: wait for its pending one, resume the generator; start what they ask for as one."""
        asked = Asked()
        self._ask(lives, asked)
        self._start(asked)

    def _ask(self, lives: list[Live], asked: Asked) -> None:
        for live in lives:
            requests = self._next(live)
            if requests is not None:
                self.counters.traffic.add(*live.course.volumes[live.stage], self.transport.world_size)
                asked.add(live, requests)
            else:
                live.done = True
                self._end(live)
        self._live = [one for one in self._live if not one.done]

    def _start(self, asked: Asked) -> None:
        """Start what has been asked for as one stage."""
        if not asked.lives:
            return
        self.counters.traffic.rounds += bool(asked.requests)
        first = asked.lives[0]
        with profiled(self.reduction.name, "start", first.stage):
            any_order = not any(live.course.ends_at_once for live in asked.lives)
            self._guarded(asked.go, Stage(self.transport, self.scratch, (first.slot, first.stage), any_order))

    def _next(self, live: Live) -> tuple[Request, ...] | None:
        """What a bucket asks for after its pending stage; ``None`` when it has ended."""
        if live.pending is not None:
            self._complete(live, live.pending)
        if not live.ghost:
            try:
                return self._resume(live)
            except BaseException as error:  # Ctrl-C too: raised in the hook it would leave DDP and the peers stuck
                self._fail(live, error)
        due = live.due
        return None if due is None else ghost(due, self.transport.world_size, live.bucket.device)

    def _end(self, live: Live) -> None:
        if self.keep_buckets:
            self.last.append(live.bucket)
        # A finite P and Q may overflow when multiplied out in fp16; opaque payloads show nothing before decoding.
        if self.reduction.fields and (live.course.opaque or live.bucket.dtype == torch.float16):
            self._sums.append(finiteness(live.bucket.storage))
        if self.on_reduced is not None and self.participating and not live.ghost:
            try:
                self.on_reduced(live.bucket)
            except BaseException as error:
                self._fail(live, error)

    def _resume(self, live: Live) -> tuple[Request, ...] | None:
        """The generator's next requests, checked against the plan; ``None`` when it ended."""
        expected = live.due
        with profiled(self.reduction.name, "stage", live.stage):
            try:
                requests = as_tuple(next(live.stages))
            except StopIteration:
                if expected is None:
                    return None
                raise HookResultError(
                    f"{self.reduction.name} ended after {live.stage} stages; its plan has {len(live.course.plan)}"
                ) from None
        found = tuple(r.plan() for r in requests)
        if found != expected:
            raise HookResultError(
                f"{self.reduction.name}, stage {live.stage} of bucket {live.bucket.index}: asked for {found}, but its "
                f"plan says {expected}. Requests may depend on the layout and the step only"
            )
        return requests

    def _complete(self, live: Live, pending: Stage) -> None:
        live.pending = None
        begun = time.perf_counter()
        with profiled(self.reduction.name, "wait", live.stage):
            self._guarded(lambda stage: stage.wait(self.timeout), pending)
        self.counters.wait_seconds += time.perf_counter() - begun
        reduced, pending.reduced = pending.reduced, []  # buckets of one round share a stage, and ask once
        if self.reduction.fields:
            self._sums.extend(finiteness(t) for t in reduced if t.is_floating_point())

    def _guarded(self, action: Callable[[Stage], object], stage: Stage) -> None:
        """Run something of the transport; when it fails the engine is dead: nobody knows what the others received."""
        try:
            action(stage)
        except Exception as error:
            lost = error if isinstance(error, CommHooksError) else TransportError(f"{type(error).__name__}: {error}")
            self.failure = lost
            self.abandon()
            self.transport.abort()
            raise lost from (None if lost is error else error)

    # -- failure of a reduction: the ghost

    def _fail(self, live: Live, error: BaseException) -> None:
        where = ENCODE if live.stage == 0 else BETWEEN if live.due is not None else DECODE
        what = (self.transport.rank, self.reduction.name, WHERE[where], live.bucket.index)
        log.error("[rank %d] %s raised %s of bucket %d", *what)
        live.stages.close()
        live.ghost = True
        if self._error is None:
            self._error = (error, where)

    # -- status

    def _only_waits(self) -> bool:
        """Whether no bucket has anything to do after its last message that could fail."""
        return self._delivers and self.on_reduced is None and all(live.due is None for live in self._live)

    def _tell(self) -> tuple[Status, Stage | None]:
        """This rank's part of the step's status, and the message under way, if there is one."""
        sums, self._sums = self._sums, []
        code = self._error[1] if self._error is not None else 0
        clock = (self.state.step if self.outside is None else self.outside.clock()) if self.participating else None
        status = Status(self.transport.rank, self.transport.world_size, code, clock, sums, self._device)
        # A step without collectives sends no status: nobody else takes part.
        together = self.transport.world_size > 1 and self.counters.communicated
        return status, self._send(status.message()) if together and self.sends_status else None

    def _verdict(self, status: Status, stage: Stage | None) -> BaseException | None:
        """Hear what the others said, and return the error that this rank raises."""
        if stage is not None:
            self._guarded(lambda s: s.wait(self.timeout), stage)
        status.heard()
        if self.outside is not None:
            self.outside.mark()
        self._status = self._unjudged = status
        late, self._late = self._late, None
        return late if self._device.type == "cuda" else self.judge(self._carry_out if stage is not None else None)

    def judge(self, carry_out: Exchange | None = None) -> BaseException | None:
        """The error of the last step that nobody has been told of yet.

        Args:
            carry_out: for the failing ranks' texts; without it, which needs no other rank, there are none.
        """
        status, self._unjudged = self._unjudged, None
        own, self._error = self._error, None
        return None if status is None else status.error(self.reduction.name, own[0] if own else None, carry_out)

    def _send(self, request: Request) -> Stage:
        stage = Stage(self.transport, self.scratch, "status", any_order=True)
        self._guarded(lambda s: s.start((request,)), stage)
        return stage

    def _carry_out(self, request: Request) -> None:
        self._guarded(lambda s: s.wait(self.timeout), self._send(request))
