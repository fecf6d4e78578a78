"""The engine runs the reductions of all buckets of a step and starts every collective in one order on all ranks.

The lockstep rule does not depend on timing. When bucket *b* arrives, start its first stage. Then advance each older bucket
by one stage, in bucket order. On the last bucket, drain. All-reduces that older buckets yield at the same time form one
stage. Collectives that cannot be merged start at once. Every collective starts on the thread that calls the hook,
before the last call of the hook returns. :mod:`ch_core.engine.schedule` decides which buckets wait for the drain,
which first stages are sent together, and which buckets are cut into pieces.

One status message in each step tells all ranks which rank raised and if the reduced numbers are finite
(:mod:`ch_core.engine.outcome`). It follows the drain. If no code of a reduction is left to run, it travels with the last
messages.
"""

import threading
import time
from collections.abc import Callable, Collection
from functools import partial
from typing import NoReturn, TypeVar
from zlib import crc32

import torch

from ch_core.bucket import Bucket, BucketLayout
from ch_core.device import is_asynchronous, is_capturing
from ch_core.engine.bucket_run import BucketRun, RequestBatch
from ch_core.engine.collectives import Sender, Stage
from ch_core.engine.drift import RankCheck
from ch_core.engine.outcome import DECODE, ENCODE, Commits, Progress, StepJudge, StepOutcome
from ch_core.engine.schedule import TUNED, CpuTuning
from ch_core.engine.stats import Counters, ResidualNorm, Sampler, residual_norms
from ch_core.errors import CommHooksError, HookNotSupportedError, TransportError
from ch_core.reduction import Reduction, StepContext
from ch_core.requests import StagePlan, as_tuple
from ch_core.scratch import Scratch
from ch_core.state import HookState
from ch_core.topology import Topology
from ch_core.transport.base import LeveledTransport, Transport
from ch_core.transport.loan import take_back

T = TypeVar("T")


class StepBuckets:
    """The buckets of the running step, or of the last one, in order of arrival.

    Attributes:
        layouts: layouts of all buckets.
        digest: digest of the layouts. Ranks with different layouts have, with few exceptions, different digests.
        in_flight: runs that are not done.
        count: number of the next run. Runs in flight have different numbers.
        keep: True if buckets stay readable after the step.
        kept: buckets that hold their average, if they are kept.
        submitted: buckets in which a late failure must still write NaN when the step ends.
    """

    __slots__ = ("count", "digest", "in_flight", "keep", "kept", "layouts", "submitted")

    def __init__(self) -> None:
        self.layouts: list[BucketLayout] = []
        self.digest = 0
        self.in_flight: list[BucketRun] = []
        self.count = 0
        self.keep = False
        self.kept: list[Bucket] = []
        self.submitted: list[Bucket] = []

    def begin(self) -> None:
        """Begin a step."""
        self.layouts.clear()
        self.digest = 0
        self.kept.clear()

    def add(self, bucket: Bucket, outcome: StepOutcome) -> BucketRun:
        """Add the next bucket of the step that has this outcome."""
        run = BucketRun(self.count, bucket, outcome)
        self.count += 1
        self.layouts.append(bucket.layout)
        self.digest = crc32(bucket.layout.digest, self.digest)
        self.in_flight.append(run)
        return run

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
        """Close all runs of a step that never finishes. Messages in flight keep the memory that they write to."""
        pending = [run.pending for run in self.in_flight if run.pending is not None]
        take_back(loan for stage in pending for loan in stage.drop())
        for run in self.in_flight:
            run.close()
        self.in_flight = []
        self.restart_numbers()


class Engine:
    """Runs one reduction over one group of ranks.

    Args:
        reduction: runs on every bucket.
        transport: carries its collectives.
        state: memory of the reduction; a fresh one if not given.
        timeout: seconds that one collective may take on the host.
        sends_status: False to send exactly the messages of DDP without a hook.
        tuning: decides how messages of a CPU are sent. All ranks need the same.

    Attributes:
        counters: cumulative figures, such as bytes and seconds.
        outcome: outcome of the running step, or of the last one.
        commits: finished steps that are not resolved yet.
        failure: error of a lost transport. The engine refuses steps until it gets another group of ranks.
        participating: True if this rank contributes data to the running step.
        buckets: buckets of the running step, or of the last one.
        sampler: measures errors of some steps for telemetry.
        rank_check: compares parameters across the ranks every few steps; ``None`` if off.
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
        self.sender = Sender(transport, self.counters, timeout, tuning)
        self.outcome = StepOutcome(reduction.name, transport, progress=Progress.RESOLVED)  # no step has run yet
        self.commits = Commits(self.state.versions)
        self.failure: BaseException | None = None
        self.participating = True
        self.buckets = StepBuckets()
        self.sampler = Sampler(transport.rank)
        self.rank_check: RankCheck | None = None
        self._sends_status = sends_status
        self._opened = False  # True if the transport knows the nodes that the reduction wants
        self._resolving = threading.RLock()
        self._first_stages = RequestBatch()  # not worth a message yet
        self._on_reduced: Callable[[Bucket], None] | None = None
        self._loss_scale: Callable[[], float] | None = None
        self.state.driven_by(self)

    @property
    def in_step(self) -> bool:
        """True if buckets of a step have arrived and the step has not ended."""
        return self.outcome.running

    # -- settings of an adapter

    def set_judge(self, judge: StepJudge | None) -> None:
        """Ask this judge if finished steps were used. Without a judge every finite step was."""
        self.commits.judge = judge

    def set_loss_scale(self, read: Callable[[], float] | None) -> None:
        """Call this function at the first bucket of each step for the loss scale of its gradients."""
        self._loss_scale = read

    def set_dropped(self, read: Callable[[], Collection[str]]) -> None:
        """Call this function when a step is committed for the parameters whose average the wrapper did not apply."""
        self.commits.dropped = read

    def set_on_reduced(self, callback: Callable[[Bucket], None] | None) -> None:
        """Call this function with each bucket as soon as it holds its average."""
        self._on_reduced = callback

    def set_participating(self, participating: bool) -> None:
        """Set if this rank contributes data. A rank that has run out of input only joins the collectives."""
        self.participating = participating

    def set_failure(self, failure: BaseException | None) -> None:
        """Refuse further steps with this error. ``None`` allows them again after members of an elastic group have met."""
        self.failure = failure

    def keep_buckets(self) -> None:
        """Keep the buckets of the last step readable until the next step begins."""
        self.buckets.keep = True

    # -- one step

    def submit(self, bucket: Bucket) -> BucketRun | None:
        """Take the next bucket of the step: start its first stage, then advance the older buckets.

        Errors of the reduction are raised by :meth:`finish` on all ranks.

        Returns:
            The run of the bucket, or of its first piece that is not done. ``None`` only from an engine of a manager,
            which skips the step after a loss.

        Raises:
            TransportError: the transport is lost.
        """
        begun = time.perf_counter()
        pieces, device = self.sender.tuning.pieces(bucket, self.reduction), bucket.device
        if not self.in_step:
            self._begin(device)
        if is_asynchronous(device):
            self.buckets.submitted.append(bucket)
        older, started = list(self.buckets.in_flight), []
        try:
            for piece in pieces:
                run = self._add(piece)
                started.append(run)
                self._start_first_stage(run)
            # The pieces of this bucket are not advanced, because their messages have only just been started.
            self._advance([run for run in older if self._advances_before_drain(run)])
        except Exception as error:
            self._lose(error)
        self.counters.hook_seconds += time.perf_counter() - begun
        return next((run for run in started if not run.done), started[-1])

    def _advances_before_drain(self, run: BucketRun) -> bool:
        """True if a later bucket advances this run. A deferred run waits for the drain.

        A deferred run that has no further stage is advanced too if a callback wants its average. It starts no collective, so
        the order of collectives stays.
        """
        return not run.plan.deferred or (self._on_reduced is not None and run.due is None)

    def advance(self) -> None:
        """Advance each bucket in flight by one stage.

        Call it between :meth:`submit` and :meth:`finish`, while other work runs. It starts collectives, so all ranks must
        call it at the same place.
        """
        begun = time.perf_counter()
        try:
            self._first_stages.start(self.sender)
            self._advance(self.buckets.in_flight)
        except Exception as error:
            self._lose(error)
        self.counters.hook_seconds += time.perf_counter() - begun

    def finish(self, *, outside: BaseException | None = None) -> BaseException | None:
        """End the step: drain and exchange the status.

        Args:
            outside: error of this rank outside the reduction. The peers learn of it.

        Returns:
            The error to raise. If one rank returns an error, all ranks do.

        Raises:
            TransportError: the transport is lost.
        """
        begun, trace = time.perf_counter(), self.counters.trace
        if trace is not None:
            trace.finishing(begun)
        if not self.in_step:  # no bucket arrived, but there is an error to send
            self.outcome = StepOutcome(self.reduction.name, self.transport, late=self.outcome.take_error())
        if outside is not None:
            self.outcome.fail(outside, ENCODE)
        status_first = self._may_send_status_before_drain()
        try:
            if status_first:
                self._send_status()
            self._drain()
            if self.sampler.recordings and self.in_step:
                # Before the status is received. Once it has arrived, the sample must be complete.
                self._local(partial(self.sampler.finish, self.reduction, self.state), DECODE)
            if not status_first:
                self._send_status()
            drained = time.perf_counter()
            self.outcome.decide(self.sender.timeout)
            if self.rank_check is not None:
                self.rank_check.finish(self.sender)
            if trace is not None:
                trace.agreed(drained, time.perf_counter())
            # Not needed if the status went first: a rank that failed has sent NaN. With a callback it is too late: the callback
            # has used the averages.
            if not status_first and self._on_reduced is None:
                self.outcome.write_nan(self.buckets.submitted)
        except Exception as lost:
            self._lose(lost)
        self.commits.finish(self.outcome, elastic=self.transport.elastic)
        try:
            error = self.outcome.error(self.sender.carry_out)
        except Exception as lost:
            self._lose(lost)
        if self.rank_check is not None:
            drift = self.rank_check.take_error()  # also after another error, or the next step would raise it
            error = error or drift
        self.buckets.restart_numbers()
        self.counters.finish(self.reduction.trips)
        self.counters.hook_seconds += time.perf_counter() - begun
        return error

    def _may_send_status_before_drain(self) -> bool:
        """True if the status can travel with the last messages, which saves one latency per step.

        Code that runs after the status must not raise, because the status could not report the error. In elastic groups an
        extra pending message would keep a dead group alive.
        """
        if not self.reduction.delivers or self._on_reduced is not None or self.transport.elastic:
            return False
        return all(run.due is None for run in self.buckets.in_flight)

    def run(self, bucket: Bucket) -> None:
        """Take a bucket and drain it. FSDP2 uses each average as soon as its call returns.

        A unit may be reduced several times in one step, if a forward uses a module twice or the loss comes in chunks. Each
        reduction starts from the state that the previous one wrote.
        """
        if self.in_step:
            self.state.draft.reopen({p.name for p in bucket.layout.params}, self.reduction.fields)
        self.submit(bucket)
        begun = time.perf_counter()
        try:
            self._drain()
        except Exception as error:
            self._lose(error)
        self.buckets.restart_numbers()
        self.counters.hook_seconds += time.perf_counter() - begun

    def abandon(self) -> None:
        """Drop an unfinished step and its draft, for example after a backward that raised.

        If only this rank started a collective, the transport's timeout ends it. Between steps it drops nothing, because
        the draft belongs to the last finished step, which may still be committed.
        """
        unfinished = self.in_step
        self.sender.forget()
        self._first_stages = RequestBatch()
        self.buckets.abandon()
        self.sampler.abandon()
        self.outcome.abandon()
        if self.rank_check is not None:
            self.rank_check.abandon()
        if unfinished:
            self.state.versions.abandon()

    # -- between steps

    def resolve_step(self, *, force: bool = False) -> bool | None:
        """Commit or roll back the last finished step; see :meth:`.Commits.resolve_step`.

        The thread of a quorum, which takes a snapshot of the state, may call it during a forward.
        """
        with self._resolving:
            return self.commits.resolve_step(force=force)

    def forget_unresolved(self) -> None:
        """Drop unresolved steps, because another state has been loaded."""
        self.commits.forget()

    def rollback(self) -> None:
        """Treat the last finished step, and steps that wait with it, as not used."""
        self.commits.rollback()

    def gather(self, mine: torch.Tensor) -> torch.Tensor:
        """Return every rank's ``mine``, shape (n,), as rows of (world_size, n). All ranks must call it."""
        try:
            return self.sender.gather(mine)
        except Exception as error:
            self._lose(error)

    def move(self, transport: Transport) -> None:
        """Use another group of ranks from the next step on. The state stays."""
        self.resolve_step()
        self.transport, self.failure, self._opened = transport, None, False
        self.sender.move(transport)
        if self.rank_check is not None:
            self.rank_check.restart()

    def plan(self, layout: BucketLayout) -> tuple[StagePlan, ...]:
        """Return the stages that a bucket of this layout passes at the present step."""
        return self.sender.plan_of(self.reduction, layout, self.context()).plan

    def context(self, step: int | None = None) -> StepContext:
        """Return a step of this rank without state, for plans.

        Args:
            step: its number; ``None`` for the present one.
        """
        rank, world = self.transport.rank, self.transport.world_size
        return StepContext(rank, world, self.state.step if step is None else step, topology=self._topology)

    def open_levels(self) -> None:
        """Learn the nodes of the ranks, if the reduction asks for them. All ranks call it at the same place.

        The first step does it otherwise.

        Raises:
            HookNotSupportedError: the transport has no nodes, or nodes of different sizes.
            RankMismatchError, HookConfigError: see :func:`ch_core.topology.learn`.
        """
        if not self.reduction.levels:
            return
        if not isinstance(self.transport, LeveledTransport):
            members = (
                "members join and leave"
                if self.transport.elastic
                else f"its transport is {type(self.transport).__name__}"
            )
            raise HookNotSupportedError(
                f"{self.reduction.name} needs ranks that stay on their nodes, and here {members}. Use the hook inside alone"
            )
        if self.transport.topology is None or (self.reduction.nodes is not None and not self._opened):
            self.transport.open_levels(self.reduction.nodes, self.sender.timeout)
        self._opened = True

    @property
    def compressing_ranks(self) -> int:
        """Number of ranks that the reduction compresses between: one per node with two levels, otherwise all."""
        return self.context().size("peers" if self.reduction.levels else "all")

    @property
    def _topology(self) -> Topology | None:
        return self.sender.topology if self.reduction.levels else None

    def residual_norms(self) -> dict[str, ResidualNorm]:
        """Return the norm of every parameter's residual after the last finished step, on this rank.

        It leaves out gradients that no longer exist, with FSDP2 all of them in the first call. From then on the engine
        keeps them.
        """
        self.keep_buckets()
        step = self.state.step if self.outcome.progress is Progress.DECIDED else max(self.state.step - 1, 0)
        return residual_norms(self.reduction, self.state, step, self.buckets.kept)

    # -- the lockstep rule

    def _begin(self, device: torch.device) -> None:
        if self.failure is not None:
            raise self.failure
        if is_capturing(device):
            # A replayed step would never be committed, and would write its state to the same of two buffers every time.
            raise HookNotSupportedError(
                f"{self.reduction.name} cannot be captured in a CUDA graph, because the host commits or rolls back each step. "
                "detach() the hook before the capture, or capture the parts of the model without their backward"
            )
        if not self._opened:
            self.open_levels()
        late = self.outcome.take_error()
        doubt = self.commits.begin(self.gather)
        stateful = bool(self.reduction.fields)
        self.outcome = StepOutcome(self.reduction.name, self.transport, check_finite=stateful, late=late)
        if doubt is not None:
            self.outcome.fail(doubt, ENCODE)
        scale = self._loss_scale
        if scale is not None and stateful:
            self._local(lambda: self.state.units.rescale(scale()))
        self.buckets.begin()
        self._local(partial(self.state.units.bring, device))
        if self.sampler.recordings:  # the status of the last step has been read, so its sample is complete
            self._local(partial(self.sampler.begin, self.reduction, self.state, self.counters))
        self.counters.begin()
        if self.rank_check is not None and not self.rank_check.note:
            self._check_ranks(self.rank_check, device)

    def _check_ranks(self, check: RankCheck, device: torch.device) -> None:
        try:
            error = check.begin(self.sender, self.reduction, self.state, device, participating=self.participating)
        except Exception as lost:
            self._lose(lost)
        if error is not None:
            self.outcome.fail(error, ENCODE)

    def _local(self, action: Callable[[], T], where: int = ENCODE) -> T | None:
        """Run code of this rank alone, such as a user's callback.

        Peers are in the step's collectives. An exception that left the hook here, even Ctrl-C, would keep them waiting. It
        fails the step instead, and all ranks raise at its end.
        """
        try:
            return action()
        except BaseException as error:
            self.outcome.fail(error, where)
            return None

    def _add(self, bucket: Bucket) -> BucketRun:
        """Plan a bucket and create its generator."""
        run = self.buckets.add(bucket, self.outcome)
        ctx = StepContext(
            self.transport.rank,
            self.transport.world_size,
            self.state.step,
            state=self.state,
            scratch=self.sender.scratch,
            owner=run.number,
            participating=self.participating,
            shared=self.reduction.shared_fields,
            absent=bucket.unused,
            topology=self._topology,
            owes=self.participating or not self.transport.elastic,
        )
        self.counters.gradient_bytes += bucket.layout.size * bucket.dtype.itemsize
        self.sender.device = bucket.device
        try:  # the plan follows from layout and step, so its errors are the same on every rank
            run.plan = self.sender.plan_of(self.reduction, bucket.layout, ctx)
            if self.reduction.fields:  # another hook may have written the state, or another memory format
                ctx.encodings = self.reduction.encodings(bucket.layout, self.state.step)
                self.state.draft.read_as(ctx.encodings)
            if self.sampler.recordings and self.participating:
                ctx.sent = self._local(partial(self.sampler.take, bucket, self.reduction, self.state))
            run.generator = self.reduction.start(bucket, ctx)  # a run() that is not a generator function may raise here
        except BaseException as error:  # Ctrl-C too
            run.fail(error)
        return run

    def _start_first_stage(self, run: BucketRun) -> None:
        """Start the first stage of a bucket, or keep it until first stages together are worth a message."""
        batch, coalesces = self._first_stages, run.plan.coalesces
        if not coalesces:
            batch.start(self.sender)
        self._advance([run], batch)
        if not coalesces or run.bucket.is_last or batch.enough(self.sender.tuning):
            batch.start(self.sender)

    def _advance(self, runs: list[BucketRun], batch: RequestBatch | None = None) -> None:
        """Advance each bucket by one stage and start its requests as one stage.

        Args:
            runs: the buckets, in order.
            batch: collects the requests instead of starting them.
        """
        if not runs:
            return
        asked = RequestBatch() if batch is None else batch
        for run in runs:
            requests = run.advance(self.sender.timeout, self.counters, self.sender.topology)
            if requests is None:
                run.complete(self._on_reduced if self.participating else None)
                continue
            self.counters.traffic.add(*run.plan.volumes[run.stage])
            if batch is None and not run.plan.merges[run.stage]:  # requests of other buckets cannot be merged with it
                alone = RequestBatch()
                alone.add(run, requests)
                alone.start(self.sender)
            else:
                asked.add(run, requests)
        self.buckets.drop_done()
        if batch is None:
            asked.start(self.sender)

    def _drain(self) -> None:
        """Advance every bucket until it is done. The newest is one stage behind, so it sends while the others work."""
        self._first_stages.start(self.sender)
        newest = self.buckets.count - 1  # by number, because ranks may differ in which of the others are done
        while self.buckets.in_flight:
            self._advance([run for run in self.buckets.in_flight if run.number < newest])
            self._advance([run for run in self.buckets.in_flight if run.number == newest])

    def _send_status(self) -> None:
        """Send this rank's part of the status. A step without collectives sends none, because no peer takes part."""
        clock = None
        if self.participating:
            clock = self.state.step + (self._local(self.commits.used_steps, DECODE) or 0)
        together = self._sends_status and self.transport.world_size > 1 and self.counters.communicated
        self.outcome.send(clock, self.sender.device, self.sender.post if together else None, self.buckets.digest)

    def _lose(self, error: Exception) -> NoReturn:
        """Drop the step and refuse further ones, because ranks may have received different messages.

        :meth:`move` and :meth:`set_failure` allow steps again, over another group of ranks.
        """
        lost = error if isinstance(error, CommHooksError) else TransportError(f"{type(error).__name__}: {error}")
        self.failure = lost
        self.abandon()
        self.transport.abort()
        raise lost from (None if lost is error else error)


class StatelessEngine:
    """Runs one bucket at a time, without state, steps or status. An exception is raised at once.

    It has scratch memory but no transport. Cached for a process group, it does not keep the group alive.
    """

    def __init__(self) -> None:
        self._scratch = Scratch()

    def run(self, reduction: Reduction, bucket: Bucket, transport: Transport) -> None:
        """Leave the average in the bucket, or in the tensors where the reduction puts it."""
        ctx = StepContext(transport.rank, transport.world_size, scratch=self._scratch)
        for requests in reduction.start(bucket, ctx):
            stage = Stage(transport, self._scratch, reduction.name)
            try:
                stage.start(as_tuple(requests)).wait(None)
            except BaseException:
                take_back(stage.drop())
                self._scratch = Scratch()
                raise
            if stage.error is not None:  # only now, because the collectives write to memory of this step
                raise stage.error
