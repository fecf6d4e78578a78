"""The engine runs the reductions of all buckets of a step and starts every collective in one order on all ranks.

The lockstep rule does not depend on timing. When bucket *b* arrives, start its first stage. Then advance each older bucket
by one stage, in bucket order. On the last bucket, drain. All-reduces that older buckets yield at the same time form one
batch. Collectives that cannot be merged start at once. Every collective starts on the thread that calls the hook,
before the last call of the hook returns. :mod:`ch_core.engine.schedule` decides which buckets wait for the drain,
which first stages are sent together, and which buckets are cut into pieces. :mod:`ch_core.engine.messages` sends them.

One status message in each step tells all ranks which rank raised and if the reduced numbers are finite
(:mod:`ch_core.engine.outcome`). It follows the drain. If no code of a reduction is left to run, it travels with the last
messages. :mod:`ch_core.engine.commits` then commits the state or rolls it back.
"""

import threading
import time
from collections.abc import Callable, Collection
from functools import partial
from typing import NoReturn, TypeVar

import torch

from ch_core.bucket import Bucket, BucketLayout
from ch_core.device import is_asynchronous, is_capturing
from ch_core.engine.commits import Commits, StepJudge
from ch_core.engine.drift import RankCheck
from ch_core.engine.messages import Batch, Messenger
from ch_core.engine.outcome import BETWEEN, DECODE, ENCODE, Progress, StepOutcome
from ch_core.engine.schedule import BucketPlan, CpuTuning, Schedule
from ch_core.engine.stats import Counters, Sampler
from ch_core.engine.step import BucketRun, Step
from ch_core.engine.weights import StepWeights, Weighing, as_message, reference_for
from ch_core.errors import CommHooksError, HookConfigError, HookNotSupportedError, TransportError
from ch_core.reduction import Reduction, Stages, StepContext
from ch_core.requests import StagePlan
from ch_core.state import HookState
from ch_core.transport.base import Transport

T = TypeVar("T")


class Engine:
    """Runs one reduction over one group of ranks.

    Args:
        reduction: runs on every bucket.
        transport: carries its collectives.
        state: memory of the reduction; a fresh one if not given.
        timeout: seconds that one collective may take on the host.
        sends_status: False to send exactly the messages of DDP without a hook.
        status_last: True to send the status after all decoding also between far ranks, for a caller that goes on to exchange
            something else. An error of one rank must then be known to all.
        tuning: decides how messages of a CPU are sent. All ranks need the same. By default it follows from the transport's link.

    Attributes:
        counters: cumulative figures, such as bytes and seconds.
        messenger: carries all messages.
        schedule: plans of the reduction.
        step: the running step, or the last one.
        commits: finished steps that are not resolved yet.
        failure: error of a lost transport. The engine refuses steps until it gets another group of ranks.
        participating: True if this rank contributes data to the steps that begin from now on.
        sampler: measures errors of some steps for telemetry.
        rank_check: compares parameters across the ranks every few steps; ``None`` if off.
        weighing: weight of this rank's next step; ``None`` if all ranks count equally.
    """

    def __init__(
        self,
        reduction: Reduction,
        transport: Transport,
        state: HookState | None = None,
        *,
        timeout: float | None = 60.0,
        sends_status: bool = True,
        status_last: bool = False,
        tuning: CpuTuning | None = None,
    ) -> None:
        self.reduction, self.transport = reduction, transport
        self.state = state if state is not None else HookState()
        self.counters = Counters()
        tuning = CpuTuning.over(transport.link) if tuning is None else tuning
        self.messenger = Messenger(transport, self.counters, timeout, tuning, reduction.name)
        self.schedule = Schedule(reduction, transport, tuning)
        self.commits = Commits(self.state.versions)
        self.failure: BaseException | None = None
        self.participating = True
        # Raised here after this rank's status was sent. The others have used that step, so parameters may differ, and every
        # step fails on all ranks until a state is loaded or the ranks change.
        self._untold: BaseException | None = None
        self.step = Step(StepOutcome(reduction.name, transport, progress=Progress.RESOLVED), True, self.messenger)
        self.sampler = Sampler(transport.rank)
        self.rank_check: RankCheck | None = None
        self.weighing: Weighing | None = None
        self._agrees = False  # True if the states of all ranks have one reference weight
        self._first_reference = 1.0  # of an elastic group whose states have none
        self._sends_status, self._status_last = sends_status, status_last
        self._resolving = threading.RLock()
        self._on_reduced: Callable[[Bucket], None] | None = None
        self._loss_scale: Callable[[], float] | None = None
        self.state.driven_by(self)

    @property
    def in_step(self) -> bool:
        """True if buckets of a step have arrived and the step has not ended."""
        return self.step.outcome.progress < Progress.DECIDED

    @property
    def outcome(self) -> StepOutcome:
        """Outcome of the running step, or of the last one."""
        return self.step.outcome

    # -- settings of an adapter

    def set_judge(self, judge: StepJudge | None) -> None:
        """Ask this judge if finished steps were used. Without a judge every finite step was."""
        self.commits.judge = judge

    def set_loss_scale(self, read: Callable[[], float] | None) -> None:
        """Call this function at the first bucket of each step for the loss scale of its gradients. ``None`` is a scale of 1."""
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

    def set_weighted(self) -> None:
        """Weigh the ranks from the next step on, by :attr:`weighing`. All ranks must make this call."""
        self.weighing = self.state.weighing = self.state.weighing or Weighing()

    def first_weight(self) -> float:
        """Return this rank's weight of the next step until its state has a reference, then 0. The host waits for it."""
        weight = self.weighing.weight if self.weighing is not None else None
        return 0.0 if weight is None or self.state.versions.reference is not None else float(weight)

    def set_first_weights(self, mean: float) -> None:
        """Set the mean of all members' :meth:`first_weight` for the next step of an elastic group."""
        self._first_reference = reference_for([mean]) or 1.0

    def set_failure(self, failure: BaseException | None) -> None:
        """Refuse further steps with this error. ``None`` allows them again after members of an elastic group have met."""
        self.failure = failure

    def keep_buckets(self) -> None:
        """Keep the buckets of the last step readable until the next step begins."""
        self.step.keep = True  # the next step inherits it

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
        pieces, device = self.schedule.pieces(bucket), bucket.storage.device
        if not self.in_step:
            self._begin(device)
        step = self.step
        weights = step.outcome.weights
        if is_asynchronous(device) or (weights is not None and not weights.early):
            step.submitted.append(bucket)
        older, started = list(step.in_flight), []
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

    def advance(self) -> None:
        """Advance each bucket in flight by one stage.

        Call it between :meth:`submit` and :meth:`finish`, while other work runs. It starts collectives, so all ranks must
        call it at the same place.
        """
        begun = time.perf_counter()
        try:
            self._start_first_stages()
            self._advance(self.step.in_flight)
        except Exception as error:
            self._lose(error)
        self.counters.hook_seconds += time.perf_counter() - begun

    def run(self, bucket: Bucket) -> None:
        """Take a bucket and drain it. FSDP2 uses each average as soon as its call returns.

        A unit may be reduced several times in one step, if a forward uses a module twice or the loss comes in chunks. Each
        reduction starts from the state that the previous one wrote.
        """
        if self.in_step:
            self.state.draft.reopen({p.name for p in bucket.layout.params}, self.reduction.fields)
        else:
            self._begin(bucket.storage.device, early=True)
        weights = self.step.outcome.weights
        if weights is not None and not weights.early:  # the caller would use an average that is not divided yet
            refusal = HookNotSupportedError("a weighted step takes its buckets by submit() or by run(), not by both")
            self.step.outcome.fail(refusal, ENCODE)
        self.submit(bucket)
        begun = time.perf_counter()
        try:
            self._drain()
        except Exception as error:
            self._lose(error)
        self.step.restart_numbers()
        self.counters.hook_seconds += time.perf_counter() - begun

    def finish(self, *, outside: BaseException | None = None) -> BaseException | None:
        """End the step: drain, agree on the outcome, and return the error.

        Args:
            outside: error of this rank outside the reduction. The peers learn of it.

        Returns:
            The error to raise. If one rank returns an error, all ranks do.

        Raises:
            TransportError: the transport is lost.
        """
        begun = time.perf_counter()
        if self.counters.trace is not None:
            self.counters.trace.finishing(begun)
        step = self.step
        if not self.in_step:  # no bucket arrived, but there is an error to send. Reports still read the buckets before
            before = step.outcome.weights
            step.outcome = self._new_outcome(late=step.outcome.take_error())
            step.participating = self.participating
            # The last step is resolved first. This step has no draft and would roll back the draft of the last one, and the
            # reference weight of this step follows from the last one.
            self._local(self.resolve_before_next_step)
            self._weigh(step.outcome, self.messenger.device, early=before is not None and before.early)
        if outside is not None:
            step.outcome.fail(outside, ENCODE)
        in_drain = self._may_send_status_in_drain()
        try:
            self._drain(then_status=in_drain)
            if self.sampler.recordings and self.in_step:
                # Before the status is received. Once it has arrived, the sample must be complete.
                self._local(partial(self.sampler.finish, self.reduction, self.state), DECODE)
            if step.outcome.progress is Progress.OPEN:
                self._send_status()
            self._agree()
            weights = step.outcome.weights
            if weights is not None:
                if not weights.early:
                    weights.divide(step.submitted)
                self.counters.weigh(weights.values)
            # Not needed after a status in the drain, because a rank that failed has sent NaN as its last message. With a callback
            # it is too late, because the callback has used the averages.
            if not in_drain and self._on_reduced is None:
                step.outcome.write_nan(step.submitted)
            self.commits.finish(step.outcome, participated=step.participating, elastic=self.transport.elastic)
            self._untold = self._untold or step.outcome.unsent
            error = step.outcome.error(self.messenger.carry_out)
        except Exception as lost:
            self._lose(lost)
        if self.rank_check is not None:
            drift = self.rank_check.take_error()  # also after another error, or the next step would raise it
            error = error or drift
        step.restart_numbers()
        self.counters.finish(self.reduction.trips)
        self.counters.hook_seconds += time.perf_counter() - begun
        return error

    def abandon(self) -> None:
        """Drop an unfinished step and its draft, for example after a backward that raised.

        If only this rank started a collective, the transport's timeout ends it. Between steps it drops nothing, because
        the draft belongs to the last finished step, which may still be committed.
        """
        unfinished = self.in_step
        self.messenger.drop()  # first, because a late message may decode until then
        self.step.abandon()
        self.sampler.abandon()
        if self.rank_check is not None:
            self.rank_check.abandon()
        if unfinished:
            self.state.versions.abandon()

    # -- between steps

    def resolve_step(self) -> bool | None:
        """Commit or roll back the last finished step, unless it waits for the judge; see :meth:`.Commits.resolve`.

        The thread of a quorum, which takes a snapshot of the state, may call it during a forward.
        """
        with self._resolving:
            return self.commits.resolve()

    def resolve_before_next_step(self) -> bool | None:
        """Commit or roll back the last finished step, tentatively if it waits for the judge."""
        with self._resolving:
            return self.commits.resolve_before_next()

    def forget_unresolved(self) -> None:
        """Drop unresolved steps, because another state has been loaded."""
        self._untold, self._agrees = None, False
        self.commits.forget()

    def rollback(self) -> None:
        """Treat the last finished step, and steps that wait with it, as not used."""
        self.commits.rollback()

    def gather(self, mine: torch.Tensor) -> torch.Tensor:
        """Return every rank's ``mine``, shape (n,), as rows of (world_size, n). All ranks must call it."""
        try:
            return self.messenger.gather(mine)
        except Exception as error:
            self._lose(error)

    def move(self, transport: Transport) -> None:
        """Use another group of ranks from the next step on. The state stays."""
        self.resolve_step()
        self.transport = self.messenger.transport = transport
        self.failure, self._untold, self._agrees = None, None, False
        self.schedule.move(transport)
        if self.rank_check is not None:
            self.rank_check.restart()

    def open_levels(self) -> None:
        """Learn the nodes of the ranks, if the reduction asks for them; see :meth:`.Schedule.open_levels`.

        The first step does it otherwise.
        """
        self.schedule.open_levels(self.messenger.timeout)

    def plan(self, layout: BucketLayout) -> tuple[StagePlan, ...]:
        """Return the stages that a bucket of this layout passes at the present step."""
        return self.schedule.plan(layout, self.context()).plan

    def context(self, step: int | None = None) -> StepContext:
        """Return a step of this rank without state, for plans.

        Args:
            step: its number; ``None`` for the present one.
        """
        return self.schedule.context(self.state.step if step is None else step)

    @property
    def compressing_ranks(self) -> int:
        """Number of ranks that the reduction compresses between: one per node with two levels, otherwise all."""
        return self.context().size("peers" if self.reduction.levels else "all")

    # -- the lockstep rule

    def _begin(self, device: torch.device, *, early: bool = False) -> None:
        """Resolve the last step and begin the next one.

        Args:
            device: device of its buckets.
            early: True if averages are used before the step ends.
        """
        if self.failure is not None:
            self._forget_weight()
            raise self.failure
        if is_capturing(device):
            # A replayed step would never be committed, and would write its state to the same of two buffers every time.
            raise HookNotSupportedError(
                f"{self.reduction.name} cannot be captured in a CUDA graph, because the host commits or rolls back each step. "
                "detach() the hook before the capture, or capture the parts of the model without their backward"
            )
        self.open_levels()
        late = self.step.outcome.take_error()
        doubt = self.commits.begin(self.gather)
        stateful = bool(self.reduction.fields)
        outcome = self._new_outcome(check_finite=stateful, late=late)
        self.step = Step(outcome, self.participating, self.messenger, self.step.keep)
        if doubt is not None:
            outcome.fail(doubt, ENCODE)
        if stateful:  # also without a scale, because the engine before may have had one
            scale = self._loss_scale
            self._local(lambda: self.state.versions.rescale(1.0 if scale is None else scale()))
        self._local(partial(self.state.versions.move_to, device))
        self._weigh(outcome, device, early=early or self._on_reduced is not None)
        if self.sampler.recordings:  # the status of the last step has been read, so its sample is complete
            self._local(partial(self.sampler.begin, self.reduction, self.state, self.counters))
        self.counters.begin()
        if self.rank_check is not None and not self.rank_check.note:
            self._check_ranks(self.rank_check, device)

    def _new_outcome(self, *, late: BaseException | None, check_finite: bool = False) -> StepOutcome:
        """Return the outcome of a step that begins. It has failed if the peers must learn of an error of an earlier step."""
        outcome = StepOutcome(self.reduction.name, self.transport, check_finite=check_finite, late=late)
        if self._untold is not None:
            outcome.fail(self._untold, DECODE)
        return outcome

    def _weigh(self, outcome: StepOutcome, device: torch.device, *, early: bool) -> None:
        """Give a step the weight of this rank, and the reference. Send the weights if averages are used early."""
        if self.weighing is None:
            return
        weight, of = self.weighing.take()
        if not self.participating:
            weight = 0.0  # a joined rank need not call weigh()
        if isinstance(weight, torch.Tensor) and not (weight.device == device and is_asynchronous(device)):
            weight = float(weight)
        versions, self.messenger.device = self.state.versions, device
        reference = versions.next_reference or versions.reference
        if not self.transport.elastic and not self._agrees:
            every = self.gather(as_message(reference or 0.0, weight, device=device)).flatten().tolist()
            if reference is None or any(other != reference for other in every[::2]):
                reference = reference_for(every[1::2])
            self._agrees = reference is not None
        if reference is not None:
            self._local(partial(versions.refer, reference))
        elif self.transport.elastic:
            # A member that joins would not take part in a gather. The states take over the reference of a committed step.
            reference = self._first_reference
        rank, world = self.transport.rank, self.transport.world_size
        outcome.weights = made = StepWeights(rank, world, weight, of, device, reference or 1.0)
        if early:
            try:
                made.post(self.messenger)
            except Exception as lost:
                self._lose(lost)

    def _forget_weight(self) -> None:
        """Forget the weight of a step that does not begin, because the next one weighs again."""
        if self.weighing is not None:
            self.weighing.clear()

    def _check_ranks(self, check: RankCheck, device: torch.device) -> None:
        participating = self.step.participating
        try:
            error = check.begin(self.messenger, self.reduction, self.state, device, participating=participating)
        except Exception as lost:
            self._lose(lost)
        if error is not None:
            self.step.outcome.fail(error, ENCODE)

    def _local(self, action: Callable[[], T], where: int = ENCODE) -> T | None:
        """Run code of this rank alone, such as a user's callback.

        Peers are in the step's collectives. An exception that left the hook here, even Ctrl-C, would keep them waiting. It
        fails the step instead, and all ranks raise at its end.
        """
        try:
            return action()
        except BaseException as error:
            self.step.outcome.fail(error, where)
            return None

    def _add(self, bucket: Bucket) -> BucketRun:
        """Plan a bucket and create its generator."""
        reduction, state, step, number = self.reduction, self.state, self.step, self.state.versions.step
        ctx = StepContext(
            self.transport.rank,
            self.transport.world_size,
            number,
            draft=state.versions.draft,
            scratch=self.messenger.scratch,
            owner=step.count,
            participating=step.participating,
            shared=reduction.shared_fields,
            absent=bucket.unused,
            topology=self.schedule.topology,
            owes=step.participating or not self.transport.elastic,
            link=self.messenger.tuning.link,
        )
        self.counters.gradient_bytes += bucket.layout.size * bucket.storage.itemsize
        self.messenger.device = bucket.storage.device
        plan: BucketPlan | None = None
        generator: Stages | None = None
        failure: BaseException | None = None
        weights = step.outcome.weights
        if weights is not None:
            self._local(partial(weights.scale, bucket))  # before a sampler copies it
        try:  # the plan follows from layout and step, so its errors are the same on every rank
            plan = self.schedule.plan(bucket.layout, ctx)
            if reduction.fields:  # another hook may have written the state, or another memory format
                ctx.encodings = reduction.encodings(bucket.layout, number)
                state.versions.draft.read_as(ctx.encodings)
            if self.sampler.recordings and step.participating:
                ctx.sent = self._local(partial(self.sampler.take, bucket, reduction, state))
            generator = reduction.start(bucket, ctx)  # a run() that is not a generator function may raise here
        except BaseException as error:  # Ctrl-C too
            failure = error
        run = step.add(bucket, plan or BucketPlan((), bucket.layout), generator)
        if failure is not None:
            run.fail(failure)
        return run

    def _start_first_stage(self, run: BucketRun) -> None:
        """Start the first stage of a bucket, or keep it until first stages together are worth a message."""
        coalesces = run.plan.coalesces
        if not coalesces:
            self._start_first_stages()
        self._advance([run], self.step.first_stages)
        if not coalesces or run.bucket.is_last or self.step.first_stages.worth_a_message:
            self._start_first_stages()

    def _start_first_stages(self) -> None:
        if self.step.first_stages.members:
            self._start(self.step.take_first_stages())

    def _advances_before_drain(self, run: BucketRun) -> bool:
        """True if a later bucket advances this run. A deferred run waits for the drain.

        A deferred run that has no further stage is advanced too if a callback wants its average. It starts no collective, so
        the order of collectives stays.
        """
        return not run.plan.deferred or (self._on_reduced is not None and run.due is None)

    def _advance(self, runs: list[BucketRun], first: Batch | None = None) -> None:
        """Advance each bucket by one stage and start its requests, merged with those of the other buckets.

        Args:
            runs: the buckets, in order.
            first: collects the requests instead, because they are first stages.
        """
        batch, ended = first, False
        for run in runs:
            requests = run.advance(self.messenger, self.schedule)
            if requests is None:
                self._divide_early(run)
                run.complete(self._on_reduced if self.step.participating else None)
                ended = True
            elif first is None and not run.plan.merges[run.stage]:  # requests of other buckets cannot be merged with it
                alone = Batch(self.messenger)
                alone.add(run, requests)
                self._start(alone)
            else:
                if batch is None:
                    batch = Batch(self.messenger)
                batch.add(run, requests)
        if ended:
            self.step.drop_done()
        if batch is not None and first is None:
            self._start(batch)

    def _divide_early(self, run: BucketRun) -> None:
        """Divide the average of a bucket by the weights, if it is used before the step ends."""
        weights = self.step.outcome.weights
        if weights is None or not weights.early:
            return
        try:
            weights.divide_early(run.bucket, self.messenger, self.reduction.name)
        except HookConfigError:  # not an average, so no callback may get it. The end of the step raises on all ranks
            run.failed = True

    def _start(self, batch: Batch) -> None:
        self.messenger.start(batch)
        if batch.error is not None:
            self.step.outcome.fail_bucket(batch.error, BETWEEN, batch.members[0][1].index)

    def _drain(self, *, then_status: bool = False) -> None:
        """Advance every bucket until it is done. The newest is one stage behind, so it sends while the others work.

        Args:
            then_status: send the status as soon as all stages have been asked for.
        """
        self._start_first_stages()
        step = self.step
        newest = step.count - 1  # by number, because ranks may differ in which of the others are done
        while step.in_flight:
            for newest_only in (False, True):
                if then_status and all(run.due is None for run in step.in_flight):
                    then_status = False
                    self._send_status()
                self._advance([run for run in step.in_flight if (run.number == newest) is newest_only])

    # -- the end of a step

    def _may_send_status_in_drain(self) -> bool:
        """True if the status can travel with the last messages, which saves one latency per step.

        Code that runs after the status must not raise, because the status could not report the error. Between far ranks it
        may. This rank then raises at once, and the status of every later step tells the others. All ranks must hold the same
        reduced numbers, because each one decides alone if they are finite. In elastic groups an extra pending message would
        keep a dead group alive.
        """
        if self._on_reduced is not None or self.transport.elastic:
            return False
        if self.reduction.delivers:
            return True
        if self.messenger.tuning.link is None or self.messenger.device.type != "cpu" or self._status_last:
            return False
        plans = [run.plan.plan for run in self.step.in_flight]
        requests = [request for plan in plans for stage in plan for request in stage]
        everywhere = all(one.scope == "all" and one.kind != "reduce_scatter" for one in requests)
        names = [p.name for run in self.step.in_flight for p in run.bucket.layout.params]
        everywhere = everywhere and all(map(self.reduction.keeps_equal, names))
        return everywhere and all(one.kind != "all_to_all" for plan in plans for stage in plan[-1:] for one in stage)

    def _send_status(self) -> None:
        """Send this rank's part of the status. A step without collectives sends none, because no peer takes part."""
        step, clock = self.step, None
        if step.participating:
            clock = self.state.step + (self._local(self.commits.used_steps, DECODE) or 0)
        # A member that heals next to a single participant is none of its ranks, and needs its weight.
        peers = self.transport.world_size > 1 or (self.transport.elastic and step.outcome.weights is not None)
        together = self._sends_status and peers and self.counters.communicated
        # A rank that has dropped a step alone is some messages ahead of the others, or behind them, for ever.
        digest = step.digest + self.transport.exchanged
        post, marked = self.messenger.post if together else None, together and self.transport.link is not None
        step.outcome.send(clock, self.messenger.device, post, digest, marked)

    def _agree(self) -> None:
        """Receive the status of all ranks, and the digests of a step whose parameters are compared."""
        begun, trace = time.perf_counter(), self.counters.trace
        self.step.outcome.decide(self.messenger.timeout)
        if self.rank_check is not None:
            self.rank_check.finish(self.messenger)
        if trace is not None:
            trace.agreed(begun, time.perf_counter())

    def _lose(self, error: Exception) -> NoReturn:
        """Drop the step and refuse further ones, because ranks may have received different messages.

        :meth:`move` and :meth:`set_failure` allow steps again, over another group of ranks.
        """
        lost = error if isinstance(error, CommHooksError) else TransportError(f"{type(error).__name__}: {error}")
        self.failure = lost
        self._forget_weight()
        self.abandon()
        self.transport.abort()
        raise lost from (None if lost is error else error)
