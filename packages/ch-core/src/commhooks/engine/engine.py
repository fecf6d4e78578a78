"""The engine: runs many reductions at once, starting every collective in one order on every rank.

The lockstep rule, independent of timing: when bucket *b* arrives, start its first stage, then advance each older bucket
by one stage, in bucket order; on the last bucket, drain. The all-reduces that older buckets ask for at one time are one
stage; what could not become one message is started at once. A bucket may be cut into pieces, each a bucket that has come
at the same time. Everything is started on the thread that calls the hook, before its last call returns. Which buckets
wait for the drain, and which first stages for one another, is decided in :mod:`commhooks.engine.schedule`. Only ending a
bucket, which starts nothing, is done at once where somebody uses each average.

One status message per step (an all-reduced vector) says on which ranks a reduction raised and whether anything
reduced was not finite; from it all ranks decide alike whether the step is committed (:mod:`commhooks.engine.outcome`). It
follows the drain, or is sent beside the last messages where nothing is left to do but to wait for them.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import NoReturn, TypeVar

import torch

from commhooks.bucket import Bucket, BucketLayout
from commhooks.engine.bucket_run import BucketRun
from commhooks.engine.counters import Counters
from commhooks.engine.open_steps import OpenSteps
from commhooks.engine.outcome import Phase, StepOutcome, told_late
from commhooks.engine.sampling import Sampler
from commhooks.engine.schedule import TUNED, CpuTuning
from commhooks.engine.sender import RequestBatch, Sender
from commhooks.engine.status import DECODE, ENCODE, StepJudge
from commhooks.engine.step_buckets import StepBuckets
from commhooks.errors import CommHooksError, HookNotSupportedError, TransportError
from commhooks.reduction import Reduction, StepContext
from commhooks.requests import StagePlan
from commhooks.state import HookState
from commhooks.transport.base import Transport

T = TypeVar("T")


class Engine:
    """Drives one reduction over one group of ranks.

    Args:
        reduction: what to run on every bucket.
        transport: where its collectives happen.
        state: what the reduction remembers; a fresh one if not given.
        timeout: seconds that one collective may take on the host.
        sends_status: off, the messages are exactly those of DDP without a hook.
        tuning: how a CPU's messages are sent, on all ranks alike.

    Attributes:
        counters: the figures behind ``handle.stats()``.
        outcome: on the running step, or the last one.
        open_steps: finished steps that are not committed yet; its ``judge`` says whether they were used.
        failure: the transport is lost: nothing can be started any more.
        buckets: of the running step, or the last one.
        sampler: samples steps for telemetry.
        participating: True if this rank contributes data to the running step.
    """

    def __init__(
        self,
        reduction: Reduction,
        transport: Transport,
        state: HookState | None = None,
        *,
        timeout: float | None = 60.0,
        sends_status: bool = True,
        tuning: CpuTuning = TUNED,
    ) -> None:
        self.reduction, self.transport = reduction, transport
        self.state = state if state is not None else HookState()
        self.counters = Counters()
        self.sender = Sender(transport, self.counters, timeout, tuning, sends_status=sends_status)
        self.outcome = StepOutcome(reduction.name, transport, phase=Phase.ROLLED_BACK)  # there has been no step
        self.open_steps = OpenSteps(self.state)
        self.failure: BaseException | None = None
        self.participating = True
        self._on_reduced: Callable[[Bucket], None] | None = None
        self._loss_scale: Callable[[], float] | None = None
        self.buckets = StepBuckets()
        self.sampler = Sampler(transport.rank)
        self.state.driven_by(self)

    @property
    def in_step(self) -> bool:
        """Whether buckets of a step have arrived and the step has not ended."""
        return self.outcome.running

    # -- one step

    def submit(self, bucket: Bucket) -> BucketRun | None:
        """Take the next bucket of the step, perhaps in pieces: start each, advance the older ones. Returns what is under
        way of it; ``None`` from an engine whose step is lost already, and which drops it.

        Errors of the reduction are kept for :meth:`finish`; errors of the transport are raised.
        """
        begun = time.perf_counter()
        pieces = self.sender.tuning.pieces(bucket, self.reduction)
        if not self.in_step:
            self._begin(bucket.device)
        if told_late(bucket.device):
            self.buckets.submitted.append(bucket)
        older, started, sender = list(self.buckets.under_way), [], self.sender
        for piece in pieces:
            live = self._activate(piece)
            started.append(live)
            try:
                if not live.plan.coalesces:
                    sender.start(sender.held)
                self._advance([live], sender.held)
                if not live.plan.coalesces or piece.is_last or sender.held.enough(sender.tuning):
                    sender.start(sender.held)
            except Exception as error:
                self._lose(error)
        # Not the pieces of this bucket: nothing has been done since that their messages could hide behind.
        used = self._on_reduced is not None
        try:
            self._advance([one for one in older if not one.plan.waits or (used and one.due is None)])
        except Exception as error:
            self._lose(error)
        self.counters.hook_seconds += time.perf_counter() - begun
        return next((live for live in started if not live.done), started[-1])

    def advance(self) -> None:
        """Each bucket under way one stage further: for who has other work to do while messages travel, between
        :meth:`submit` and :meth:`finish`. On all ranks at the same place, because it starts collectives.
        """
        begun = time.perf_counter()
        try:
            self.sender.start(self.sender.held)
            self._advance(self.buckets.under_way)
        except Exception as error:
            self._lose(error)
        self.counters.hook_seconds += time.perf_counter() - begun

    def finish(self, *, outside: BaseException | None = None) -> BaseException | None:
        """End the step: drain, exchange the status, return the error to raise: the same decision on every rank.

        Args:
            outside: an error of this rank that happened outside the reduction, to be made known to the others.
        """
        begun = time.perf_counter()
        if not self.in_step:  # nothing came, but there is an error to make known
            self.outcome = StepOutcome(self.reduction.name, self.transport, late=self.outcome.take_error())
        if outside is not None:
            self.outcome.fail(outside, ENCODE)
        # Where members come and go, one more message under way keeps a group alive from which a peer has gone. Where
        # something of a bucket is still to run, it may fail, and the others have to be told.
        delivers = self.reduction.delivers and not self.transport.elastic and self._on_reduced is None
        beside = delivers and all(live.due is None for live in self.buckets.under_way)
        try:
            if beside:
                self.sender.send_status(self.outcome, self._clock())
            self._drain()
            if self.sampler.recordings and self.in_step:  # before the status is received: its event covers the figures
                self._local(partial(self.sampler.end, self.reduction, self.state), DECODE)
            if not beside:
                self.sender.send_status(self.outcome, self._clock())
            self.outcome.decide(self.sender.timeout)
            if not beside and self._on_reduced is None:
                self.outcome.spoil(self.buckets.submitted)
        except Exception as lost:
            self._lose(lost)
        self.open_steps.ended(self.outcome, elastic=self.transport.elastic)
        try:
            error = self.outcome.error(self.sender.carry_out)
        except Exception as lost:
            self._lose(lost)
        self.buckets.drained()
        self.counters.end(self.reduction.trips)
        self.counters.hook_seconds += time.perf_counter() - begun
        return error

    def run(self, bucket: Bucket) -> None:
        """The immediate driver: run one bucket from its first stage to its end (FSDP2, whose calls stand alone).

        A unit may be reduced several times in one step (a module that a forward uses twice, a loss in chunks). Each
        reduction starts from the state that the one before has staged.
        """
        if self.in_step:
            self.state.reopen({p.name for p in bucket.layout.params}, self.reduction.fields)
        self.submit(bucket)
        begun = time.perf_counter()
        try:
            self._drain()
        except Exception as error:
            self._lose(error)
        self.buckets.drained()
        self.counters.hook_seconds += time.perf_counter() - begun

    def abandon(self) -> None:
        """Forget a step that will never finish (a backward that raised half way), and what it staged.

        Collectives that this rank started and others did not are ended by the transport's timeout.
        """
        self.sender.forget()
        self.buckets.abandon()
        self.sampler.abandon()
        self.outcome.abandon()
        self.state.rollback()

    # -- what an adapter tells it

    def set_judge(self, judge: StepJudge | None) -> None:
        """Ask this judge if finished steps were used. Without one, every finite step was."""
        self.open_steps.judge = judge

    def set_loss_scale(self, read: Callable[[], float] | None) -> None:
        """Call this function at the first bucket of each step for the loss scale of its gradients."""
        self._loss_scale = read

    def set_on_reduced(self, callback: Callable[[Bucket], None] | None) -> None:
        """Call this function with each bucket as soon as it holds its average."""
        self._on_reduced = callback

    def set_participating(self, participating: bool) -> None:
        """Say if this rank contributes data from the next step on. One that has run out of input joins the collectives only."""
        self.participating = participating

    def keep_buckets(self) -> None:
        """Keep the buckets of the last step readable until the next step begins."""
        self.buckets.keep = True

    # -- between steps

    def resolve_step(self, *, force: bool = False) -> bool | None:
        """Commit or roll back the last finished step and those that wait with it; see :meth:`.OpenSteps.settle`."""
        return self.open_steps.settle(force=force)

    def forget_open_steps(self) -> None:
        """Another state has been loaded: what is still open was part of the one before."""
        self.open_steps.forget()

    def rollback(self) -> None:
        """The optimizer did not use the last finished step, nor those that wait with it: as if they had never been."""
        self.open_steps.rollback()

    def gather(self, mine: torch.Tensor) -> torch.Tensor:
        """Every rank's ``mine`` (1-D), one row each. Between steps, on all ranks alike."""
        try:
            return self.sender.gather(mine)
        except Exception as error:
            self._lose(error)

    def move(self, transport: Transport) -> None:
        """Go on over another group of ranks, between steps. The state stays."""
        self.resolve_step()
        self.transport, self.failure = transport, None
        self.sender.move(transport)

    def plan(self, layout: BucketLayout) -> tuple[StagePlan, ...]:
        """The stages that a bucket of this layout goes through at the present step."""
        ctx = StepContext(self.transport.rank, self.transport.world_size, self.state.step)
        return self.sender.plan_of(self.reduction, layout, ctx).plan

    # -- the lockstep rule

    def _begin(self, device: torch.device) -> None:
        if self.failure is not None:
            raise self.failure
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            # Replayed, a step would be committed never, and its state written to the same of two buffers every time.
            raise HookNotSupportedError(
                f"{self.reduction.name} cannot be captured in a CUDA graph: the host decides after each step what becomes "
                "of it. detach() the hook before the capture, or capture the parts of the model without their backward"
            )
        late = self.outcome.take_error()
        doubt = self.open_steps.answer(self.gather)
        looks = bool(self.reduction.fields)  # one without state has nothing to undo
        self.outcome = StepOutcome(self.reduction.name, self.transport, looks=looks, late=late)
        if doubt is not None:
            self.outcome.fail(doubt, ENCODE)
        scale = self._loss_scale
        if scale is not None and self.reduction.fields:
            self._local(lambda: self.state.rescale(scale()))
        self.buckets.begin()
        self._local(lambda: self.state.bring(device))
        if self.sampler.recordings:  # the status of the last step has been read, so its sample is complete
            self._local(lambda: self.sampler.begin(self.reduction, self.state, self.counters))
        self.counters.begin()

    def _local(self, action: Callable[[], T], where: int = ENCODE) -> T | None:
        """Run code that belongs to this rank alone, such as a user's callback.

        Peers are in the step's collectives. An exception that left the hook here would keep them waiting, so it fails the
        step and all ranks raise at its end. That includes Ctrl-C.
        """
        try:
            return action()
        except BaseException as error:
            self.outcome.fail(error, where)
            return None

    def _clock(self) -> int | None:
        """Steps behind this rank, for the status; ``None`` if it does not count."""
        if not self.participating:
            return None
        used = self._local(self.open_steps.used_steps, DECODE)
        return self.state.step + (used or 0)

    def _activate(self, bucket: Bucket) -> BucketRun:
        live = self.buckets.add(bucket, self.outcome)
        ctx = StepContext(
            self.transport.rank,
            self.transport.world_size,
            self.state.step,
            state=self.state,
            scratch=self.sender.scratch,
            owner=live.slot,
            participating=self.participating,
            shared=self.reduction.shared_fields,
            absent=bucket.unused,
        )
        self.counters.gradient_bytes += bucket.layout.size * bucket.dtype.itemsize
        self.sender.device = bucket.device
        try:  # what the plan raises is the same on every rank: it follows from layout and step
            live.plan = self.sender.plan_of(self.reduction, bucket.layout, ctx)
            if self.reduction.fields:  # another hook may have written the state, or another memory format
                self.state.read_as(self.reduction.encodings(bucket.layout, self.state.step))
            if self.sampler.recordings and self.participating:
                ctx.sent = self._local(lambda: self.sampler.take(bucket, self.reduction, self.state))
            live.stages = self.reduction.start(bucket, ctx)  # a run() that is no generator function may raise here
        except BaseException as error:  # Ctrl-C too
            live.fail(error)
        return live

    def _advance(self, lives: list[BucketRun], held: RequestBatch | None = None) -> None:
        """Each one stage further: wait for its pending one, resume the generator; start what they ask for as one, or leave
        it in ``held``.
        """
        if not lives:
            return
        asked = RequestBatch() if held is None else held
        for live in lives:
            requests = live.advance(self.sender.timeout, self.counters)
            if requests is not None:
                self.counters.traffic.add(*live.plan.volumes[live.stage])
                alone = held is None and not live.plan.merges[live.stage]
                batch = RequestBatch() if alone else asked
                batch.add(live, requests)
                if alone:  # nothing of another bucket would travel with it
                    self.sender.start(batch)
            else:
                live.end(self._on_reduced if self.participating else None)
        self.buckets.ended()
        if held is None:
            self.sender.start(asked)

    def _drain(self) -> None:
        """Advance every live bucket to its end; the last, a stage behind, sends while the others work."""
        self.sender.start(self.sender.held)
        newest = self.buckets.count - 1  # by number: which of the others have ended already may differ between ranks
        while self.buckets.under_way:
            self._advance([live for live in self.buckets.under_way if live.slot < newest])
            self._advance([live for live in self.buckets.under_way if live.slot == newest])

    def _lose(self, error: Exception) -> NoReturn:
        """The transport failed. The engine is dead: nobody knows what the others received."""
        lost = error if isinstance(error, CommHooksError) else TransportError(f"{type(error).__name__}: {error}")
        self.failure = lost
        self.abandon()
        self.transport.abort()
        raise lost from (None if lost is error else error)
