"""The outer optimizer: inner steps on each rank alone, and rounds in which all ranks move to one start."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from os import PathLike
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from ch_outer.buffers import Buffers
from ch_outer.fragment import Fragment, divide, start_of
from ch_outer.inner_optimizer import InnerOptimizer
from ch_outer.outer_sgd import OuterFactory, default_outer, warn_of_short_run
from ch_outer.parameters import (
    check_parameters,
    facts_of,
    local,
    options_of,
    parameters_of,
    reshard,
    shard_groups,
    trained,
    write,
)
from ch_outer.round_figures import Progress
from ch_outer.round_votes import FixedRounds, ManagedRounds, Manager, Rounds
from ch_outer.schedule import Schedule
from ch_outer.state import (
    broadcast_newest,
    check_checkpoint,
    equals_snapshot,
    join,
    load_checkpoint,
    load_snapshot,
    snapshot,
)
from ch_outer.step_watch import Followed
from ch_outer.telemetry import COLUMNS, Recorder
from commhooks import HookConfigError, Reducer, StateError
from commhooks.adapters import Transport
from commhooks.telemetry import Writer, csv_file
from commhooks.trace import Trace


class OuterOptimizer(InnerOptimizer):
    """Steps ``optim`` on this rank alone, and exchanges the moves of its parameters every ``every`` steps.

    This is a real optimizer. Closures, schedulers, ``GradScaler``, gradient clipping and hooks see the groups of the inner
    optimizer. Under a ``GradScaler`` each ``scaler.step(optimizer)`` counts, also if this rank skips it for an infinite gradient.
    Ranks so stay together.

    Every rank makes the same number of ``step()`` calls, because these calls send the messages. Parameters, frozen ones too, and
    averaged buffers must be equal on all ranks at construction. Under a ``manager`` they may differ. A new member receives
    start, outer optimizer, buffers and counts in its first ``step()``, before its inner step. It must bring frozen parameters
    itself.

    Each round checks that all trainable parameters and floating-point buffers of the model are exchanged.

    Args:
        optim: the inner optimizer, of any class.
        model: the model. All its trainable parameters are exchanged, whichever optimizer steps them. Step several inner
            optimizers one after another, and wrap the last. The model is plain, in DDP, or sharded by FSDP2. Shards are
            exchanged with the same shards of other groups.
        every: inner steps between two exchanges of one parameter.
        exchange: averages the pseudo-gradients: any reduction (expression, dict or object).
        outer: makes the outer optimizer of the starts. The default is ``nesterov(1.0, 0.3)``, which suits short runs. More
            momentum needs more rounds (:func:`.rounds_needed`).
        fragments: number of fragments of equal size that take turns, or the parameter names of each fragment.
        overlap: inner steps that an exchange has to arrive.
        mix: share of a rank's own parameters that stays on arrival. 0 takes the new start, and loses the inner steps of the
            overlap. 0.5 is Streaming DiLoCo's. ``"carry"`` adds the inner steps of the overlap to the new start.
        buffers: ``"average"`` averages floating-point buffers (BatchNorm's statistics) exactly after the last fragment of a
            round, so that all ranks hold one model. ``"local"`` leaves them alone. Integer buffers are always local.
        process_group: the ranks that exchange. With DDP or FSDP2 inside groups, the ranks of equal place in each group.
        transport: instead of a process group, for example the transport of a simulated rank.
        manager: instead of a process group, a torchft manager (with ch-ft installed), whose members come and go. Only the outer
            optimizer may call its ``start_quorum()`` and ``should_commit()``. ``overlap`` is then at most
            ``every // fragments``.
        timeout: seconds that one collective may take; by default those of the process group. A manager has its own.
        verify_ranks: True to compare options, shapes and starts over the ranks first. Under a manager each round compares
            options and shapes.
        steps: inner steps of the whole run, if known. The constructor then warns of too few rounds for the momentum of a given
            ``outer``. Without it, :meth:`finish` warns.

    Attributes:
        outer: the outer optimizer of the starts, in model order. Its learning rate may be scheduled.
        count: inner steps done, skipped ones included.
        landed: exchanges that have moved a start.
        schedule: times of the exchanges.

    Raises:
        HookConfigError: an option is out of range, or the inner optimizer steps a tensor that is not a parameter of the model.
        RankMismatchError: ranks differ in options or parameters.

    Example:
        >>> import torch
        >>> from commhooks.simulate import SimulatedGroup, SimulatedTransport
        >>> model = torch.nn.Linear(3, 1)
        >>> inner = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> alone = SimulatedTransport(SimulatedGroup(1), 0)
        >>> optimizer = OuterOptimizer(inner, model, every=2, transport=alone)
        >>> schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        >>> for _ in range(4):
        ...     loss = model(torch.ones(1, 3)).sum()
        ...     loss.backward()
        ...     optimizer.step()
        ...     schedule.step()
        >>> optimizer.count, optimizer.stats()["rounds_done"]
        (4, 2.0)
    """

    def __init__(
        self,
        optim: Optimizer,
        model: torch.nn.Module,
        *,
        every: int,
        exchange: Any = "allreduce",
        outer: OuterFactory | None = None,
        fragments: int | Sequence[Sequence[str]] = 1,
        overlap: int = 0,
        mix: float | str = 0.0,
        buffers: str = "average",
        process_group: dist.ProcessGroup | None = None,
        transport: Transport | None = None,
        manager: Manager | None = None,
        timeout: float | None = None,
        verify_ranks: bool = True,
        steps: int | None = None,
    ) -> None:
        params = trained(model, optim)
        parts = divide(params, fragments)
        self.schedule = Schedule(every, len(parts), overlap)
        super().__init__(optim)
        starts = {name: start_of(param) for name, param in params.items()}
        self.outer = (outer or default_outer())(list(starts.values()))
        if steps is not None and outer is not None:
            warn_of_short_run(self.outer, steps // every)
        self.count, self.landed = 0, 0
        self._model, self._exchanged, self._warns = model, params, steps is None and outer is not None
        self._progress = Progress()
        self._recorders: list[Recorder] = []
        self._device = next(iter(starts.values())).device
        self._failure: Exception | None = None  # of an outer step that failed on this rank alone
        self._finishing = False
        self._goal: int | None = None  # committed rounds after which `finish` ends, equal on all ranks
        self._takeovers = 0  # how often this member received the state of a peer
        where: dict[str, Any] = {"process_group": process_group, "transport": transport, "manager": manager}
        where |= {"timeout": timeout, "verify_ranks": verify_ranks}
        fixed = manager is None  # a manager sends its members equal values, so only fixed ranks compare values
        facts = facts_of(model, starts, parameters_of(model)[1], buffers, values=verify_ranks and fixed)
        facts["outer step"] = [f"{self.schedule}, mix={mix}, buffers={buffers}", *options_of(self.outer)]
        self._rounds: Rounds = FixedRounds()
        if manager is not None:
            self._rounds = ManagedRounds(manager, self.schedule, facts=facts, verify_ranks=verify_ranks)
        self._fragments: list[Fragment] = []
        for index, names in enumerate(parts):
            mine = {name: starts[name] for name in names}
            # Each fragment has its own reducer, so that a round of a fragment is one committed step of its state.
            reducer = Reducer(exchange, mine, facts=facts, rounds=self._rounds.of(index), **where)
            self._fragments.append(Fragment({name: params[name] for name in names}, mine, reducer, mix, fixed=fixed))
        self._buffers = Buffers(model, buffers, **where)
        if manager is not None:
            manager.register_state_dict_fn("ch_outer", self._take_over, self._hand_over)

    # -- steps

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make an inner step, then receive and start the exchanges that are due. Return the closure's result.

        Raises:
            CommHooksError: an exchange failed, on all ranks. The inner step is done. Start and parameters have not moved, or
                have moved if only buffers failed, and the next round exchanges the moves of this one. After a TransportError or
                HookTimeoutError the process group is lost. Members of a manager vote the round down instead, and only the
                failing member raises.
        """
        took_over = self.before_step()
        loss = None if took_over and closure is None else self.scaled_step(closure)
        self.after_step()
        return loss

    def before_step(self) -> bool:
        """Make the half of :meth:`step` before the inner step.

        Returns:
            True if this rank has just taken over the start of a peer. Its gradients then belong to other parameters.
        """
        self._progress.began()
        with torch.no_grad():
            took_over = self._meet()
            self._goal = None  # peers may finish, this rank does not
        return took_over

    def after_step(self) -> None:
        """Count an inner step, then receive and start the exchanges that are due.

        Raises:
            CommHooksError: as :meth:`step`.
        """
        failed = None
        self.count += 1
        with torch.no_grad(), self._progress.exchange():
            try:
                self._advance_exchanges()
            except Exception as error:  # any type, because a reduction raises its own
                if not isinstance(self._rounds, ManagedRounds):
                    raise
                failed = error  # the other members only see a lost round and begin the next one, as must this member
            self._start_due()
        if failed is not None:
            raise failed

    def follow(self, *others: Optimizer, finish_after: int | None = None) -> Callable[[], None]:
        """Make outer steps whenever ``step()`` of the inner optimizer itself is called, instead of :meth:`step`.

        For code that holds the inner optimizer, such as a framework. Closures, schedulers and a ``GradScaler`` work on the inner
        optimizer as before. Do not call :meth:`step` any more.

        Args:
            others: further optimizers of the model. In each iteration they step once each, in this order, before the inner one.
            finish_after: inner steps of the run. After the last of them :meth:`finish` is called.

        Returns:
            A function that ends this.
        """

        def check() -> None:
            if self.count == finish_after:
                self.finish()

        return Followed(self, [*others, self.optim], check).close

    def _start_due(self) -> None:
        for due in self.schedule.due(self.count):
            self._round(due, overlap=self.schedule.overlap > 0)

    def _advance_exchanges(self) -> None:
        """Land the exchanges that are due and advance the others, in the order of their starts, which all ranks share."""
        for since, index in self._in_flight():
            passed = self.count - since
            if passed >= self.schedule.overlap:
                self._land(index)
                continue
            fragment = self._fragments[index]
            for _ in range(self.schedule.advances(fragment.reducer.stages, passed)):
                fragment.advance()

    def _in_flight(self) -> list[tuple[int, int]]:
        """Return ``(inner steps at the start, index)`` of the fragments under way, oldest first."""
        return sorted((f.since, index) for index, f in enumerate(self._fragments) if f.since is not None)

    # -- rounds

    def _round(self, due: int, *, overlap: bool = False) -> bool:
        """Exchange the fragment that has its turn. Return True if it has landed or, in a job's first round, if all have met."""
        index = self._rounds.open(due)
        if self._finishing and self._goal is None:
            self._goal = self._rounds.committed(self.landed) + len(self._fragments)
        if index is None:
            return self._rounds.close()
        try:
            self._fragments[index].begin(self.count, self._obstacle())
        except Exception:
            self._rounds.close()
            raise
        return False if overlap else self._land(index)

    def _obstacle(self) -> Exception | None:
        """Return a reason why this rank cannot contribute. Raised before the round, it would leave the peers waiting in it."""
        try:
            if self._failure is not None:
                raise self._failure
            check_parameters(self._model, self.optim, self._exchanged)
            self._buffers.check_names()
        except Exception as error:
            return error
        return None

    def _land(self, index: int) -> bool:
        """Receive an exchange and move the start. Return False if the members of a manager voted it down."""
        fragment, buffers, takeovers = self._fragments[index], {}, self._takeovers
        try:
            fragment.receive()
            apart = fragment.apart()
            if index == len(self._fragments) - 1:
                buffers = self._buffers.average()
        except Exception:
            if isinstance(self._rounds, ManagedRounds):
                fragment.miss()
                fragment.reducer.rollback()
            self._rounds.close()
            if fragment.waiting:  # only the buffers failed, and all ranks have the average
                self._move_start(fragment)
                fragment.settled = None  # the buffers are not equal
            raise
        if not self._rounds.close():
            fragment.miss()
            return False
        self._move_start(fragment, healed=self._takeovers > takeovers)
        self._note(apart)
        self._buffers.put(buffers)
        return True

    def _note(self, apart: float) -> None:
        """Note an exchange that has landed."""
        self._progress.landed(apart)
        for recorder in list(self._recorders):
            recorder.landed(self.landed, apart)

    def _move_start(self, fragment: Fragment, *, healed: bool = False) -> None:
        try:
            fragment.land(self.outer, healed=healed)
        except Exception as error:  # a user's outer optimizer may raise here, while the peers move their starts
            self._failure = StateError(
                f"the outer step of an earlier round failed on this rank ({type(error).__name__}: {error}), so its start "
                "differs from that of its peers. Load a state_dict() on all ranks"
            )
            raise
        self.landed += 1
        reshard(self._model)

    # -- members that come and go

    def _meet(self) -> bool:
        """Take part in a round of the peers before a member's first step. Return True if the member took over their start."""
        takeovers = self._takeovers
        while not self._rounds.met:
            before = self.landed
            self._rounds.met = self._round(0)
            if self._rounds.met and self.landed > before and self.schedule.overlap and self._goal is None:
                self.count += self.schedule.overlap  # peers that do not finish have made these steps since the exchange
                self._start_due()
        return self._takeovers > takeovers

    def _hand_over(self) -> dict[str, Any]:
        """Return the state for a member that is behind. Reductions send their shared state themselves."""
        given = snapshot(self._fragments, self.outer, self._buffers)
        return {**given, "schedule": str(self.schedule), "count": self.count, "landed": self.landed, "goal": self._goal}

    def _take_over(self, given: Mapping[str, Any]) -> None:
        """Load a peer's state. The manager calls this before a round's exchange (a synchronous quorum) or in its vote.

        Raises:
            StateError: the peer trains another model or uses another schedule.
        """
        if given["schedule"] != str(self.schedule):
            raise StateError(
                f"the peers use {given['schedule']}, this member {self.schedule}: give all members the same every=, fragments= "
                "and overlap="
            )
        same = equals_snapshot(self._fragments, self._buffers, given)  # refuses another model before anything changes
        self._goal = given["goal"] if given["goal"] is not None else self._goal
        if same and self.landed == given["landed"]:
            return  # a job's first quorum heals all members but one, also members that are equal already
        since = next((f.since for f in self._fragments if f.since is not None), self.count)
        with torch.no_grad():
            load_snapshot(self._fragments, self.outer, self._buffers, given)
            reshard(self._model)
        ahead = given["count"] - since  # the peer counted its steps when the round started
        self.count += ahead
        for fragment in self._fragments:
            fragment.renumber(ahead)
        self.landed, self._failure = given["landed"], None
        self._takeovers += 1

    def move(self, process_group: dist.ProcessGroup) -> None:
        """Continue over another process group, which has survivors of a lost one and new ranks.

        All ranks of the new group make this call. A new rank first makes an optimizer with equal options over a group that
        contains only itself. Exchanges under way are dropped. An average that a checkpoint waited for lands. The rank with most
        exchanges gives start, outer optimizer, averaged buffers, counts and shared state to all. New ranks, and ranks that missed
        an exchange, begin at the start with these buffers. The others keep their parameters and residuals.

        Raises:
            HookConfigError: under a manager, which does this itself.
            RankMismatchError: the optimizers do not belong together.
        """
        if isinstance(self._rounds, ManagedRounds):
            raise HookConfigError("there is no move() under a manager, whose members come and go by themselves")
        with torch.no_grad():
            for fragment in sorted(self._fragments, key=lambda f: f.since or 0):
                if fragment.waiting:
                    self._move_start(fragment)
                fragment.drop()
        for reducer in self._reducers():
            reducer.move(process_group)
        given = broadcast_newest(self.state_dict(), (self.landed, self.count), process_group, self._device)
        behind = self.landed < given["landed"] or self.count == 0
        self.outer.load_state_dict(given["outer"])
        self.count, self.landed, self._failure = given["count"], given["landed"], None
        with torch.no_grad():
            join(self._fragments, self._buffers, given, behind=behind)
        reshard(self._model)

    # -- between steps

    @property
    def under_way(self) -> int:
        """Number of exchanges under way. At 0 a pause, for example to evaluate, gives no message more time."""
        return len(self._in_flight())

    def finish(self) -> None:
        """End the training, on all ranks. Land the exchanges under way, then exchange the remaining moves.

        All ranks then hold the start as their parameters. A fragment without an inner step since its last exchange has no
        remaining moves. A further round would only repeat the outer momentum, so there is none. Members of a manager cannot
        know this of each other, so they exchange each fragment once more.

        Raises:
            CommHooksError: as :meth:`step` does.
        """
        with torch.no_grad():
            for _, index in self._in_flight():
                self._land(index)
            if isinstance(self._rounds, FixedRounds):
                for index, fragment in enumerate(self._fragments):
                    if fragment.settled != self.count:
                        self._round(index)
            else:
                self._finish_managed()
            for fragment in self._fragments:
                fragment.begin_at(fragment.starts)
            reshard(self._model)
        if self._warns:
            warn_of_short_run(self.outer, self.landed // len(self._fragments))

    def _finish_managed(self) -> None:
        """Exchange each fragment once. A manager repeats a lost round, and all members count the committed ones."""
        self._finishing, done = True, 0
        self._meet()
        try:
            while self._goal is None or self._rounds.committed(self.landed) < self._goal:
                done += self._round(done % len(self._fragments))
        finally:
            self._finishing, self._goal = False, None

    @contextmanager
    def global_parameters(self) -> Iterator[None]:
        """Put the model that all ranks share in place, to evaluate or save it: the starts and the last average of the buffers.

        Example:
            >>> from commhooks.simulate import SimulatedGroup, SimulatedTransport
            >>> model, alone = torch.nn.Linear(1, 1, bias=False), SimulatedTransport(SimulatedGroup(1), 0)
            >>> inner = torch.optim.SGD(model.parameters(), lr=1.0)
            >>> optimizer = OuterOptimizer(inner, model, every=9, transport=alone)
            >>> before = model.weight.item()
            >>> model(torch.ones(1, 1)).sum().backward()
            >>> optimizer.step()
            >>> with optimizer.global_parameters():
            ...     same = model.weight.item() == before
            >>> same, model.weight.item() == before
            (True, False)
        """
        places = [(local(mine), shared) for mine, shared in self.shared()]
        own = [mine.clone() for mine, _ in places]
        try:
            write(self._model, places)
            yield
        finally:
            write(self._model, [(mine, before) for (mine, _), before in zip(places, own, strict=True)])

    def shared(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the model that all ranks share, as pairs of a parameter or buffer and its shared value.

        A shared value is the start of a parameter (of its shard, under FSDP2) or the last average of a buffer.
        """
        pairs = [(f.params[name], start) for f in self._fragments for name, start in f.starts.items()]
        return pairs + self._buffers.places()

    def stats(self) -> dict[str, float]:
        """Return the sum of all exchanges' figures (see :meth:`commhooks.CommHook.stats`), and ``rounds_done``."""
        rows = [reducer.stats() for reducer in self._reducers()]
        whole = float(self.landed // len(self._fragments))
        return {key: sum(row[key] for row in rows) for key in rows[0]} | {"rounds_done": whole}

    def trace(self, path: "str | PathLike[str]", *, limit: int = 100_000) -> Trace:
        """Record the rounds of all ranks, as :meth:`commhooks.CommHook.trace` records the steps of a hook.

        Every rank must make this call, and close the trace, between the same two steps.

        Args:
            path: file to write.
            limit: number of events that each fragment keeps.

        Raises:
            HookNotSupportedError: a manager, whose members come and go; or it is traced already.
        """
        engines, groups = {}, []
        for index, fragment in enumerate(self._fragments):
            binding = fragment.reducer.handle.binding
            if binding is not None and binding.engine is not None:
                engines[f"fragment {index}"] = binding.engine
                groups = [binding.group, *shard_groups(self._exchanged.values())] if binding.group is not None else []
        expr = self._fragments[0].reducer.handle.expr
        hook = f"outer optimizer, exchange={expr}"
        return Trace(path, engines, hook=hook, groups=groups, limit=limit, model=self._model, during="inner steps")

    def record(self, to: "Writer | str | PathLike[str]", *, every: int = 1, rank: int | None = 0) -> Recorder:
        """Record figures of exchanges over time, as :func:`commhooks.telemetry.record` does for the steps of a hook.

        A record has ``inner_steps`` so far, ``apart`` (see :meth:`report`), and since the last record ``exchange_seconds``,
        ``payload_bytes`` and ``wire_bytes``. If the writer raises, recording ends and training continues.

        Args:
            to: called as ``to(number, figures)``, for example :func:`commhooks.telemetry.tensorboard`; or the path of a CSV file.
            every: exchanges from one record to the next, the first one included.
            rank: rank of the exchange that records; ``None`` if each rank does, with its own ``to``.

        Returns:
            The recording, to close or to use as a ``with`` block.
        """
        if every < 1:
            raise ValueError(f"every={every}: expected a number of exchanges, at least 1")
        write: Writer = to if callable(to) else csv_file(to, COLUMNS)
        recorder = Recorder(write, every, self._totals, self._stop_recording)
        if rank is None or self._fragments[0].reducer.rank == rank:
            self._recorders.append(recorder)
        return recorder

    def _shared_until(self, index: int) -> int:
        """Return the inner steps of which all ranks have the moves of a fragment."""
        landed = self._fragments[index].landed
        if landed is not None:
            return landed
        return self.schedule.last(index, max(0, self.count - self.schedule.overlap))  # also after a state was loaded

    def _stop_recording(self, recorder: Recorder) -> None:
        self._recorders = [one for one in self._recorders if one is not recorder]

    def _totals(self) -> dict[str, float]:
        stats = self.stats()
        found = {name: stats[name] for name in ("payload_bytes", "wire_bytes")}
        return {**found, "exchange_seconds": self._progress.seconds, "inner_steps": float(self.count)}

    def report(self) -> dict[str, Any]:
        """Return figures for people, as plain values.

        ``exchange_share`` is the share of this rank's time in which steps waited for exchanges. ``apart`` has, for each exchange,
        the distance of this rank's parameters from the mean of all ranks, divided by the parameters' norm. ``apart_growth``
        compares the latest distances with the first. ``steps_alone`` counts the latest inner steps that no other rank has yet.
        """
        alone = self.count - min(map(self._shared_until, range(len(self._fragments))))
        return {**self._progress.figures(), "steps_alone": alone}

    def _reducers(self) -> list[Reducer]:
        return [*(fragment.reducer for fragment in self._fragments), *self._buffers.reducers]

    # -- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return the state from which this rank continues to the bit. All ranks save at the same step.

        Exchanges under way are received, and their averages are saved with the step at which they are due. Save the model as
        well. ``torch.load(weights_only=True)`` reads this state.

        Raises:
            RuntimeError: under a manager, if an exchange is under way, because the vote on it is open.
        """
        if self.under_way and isinstance(self._rounds, ManagedRounds):
            raise RuntimeError(
                "an exchange is under way, and the vote on it is open. Save where optimizer.under_way is 0"
            )
        return {
            "inner": self.optim.state_dict(),
            "outer": self.outer.state_dict(),
            "count": self.count,
            "landed": self.landed,
            "fragments": [fragment.state_dict() for fragment in self._fragments],
            "buffers": self._buffers.state_dict(),
            "schedule": str(self.schedule),
        }

    def load_state_dict(self, state_dict: dict[str, Any], *, world_change: str = "error") -> None:
        """Continue from :meth:`state_dict`, on all ranks. Load the model's own state as well. A refused state changes nothing.

        Args:
            state_dict: this rank's state.
            world_change: for another number of ranks, see :meth:`commhooks.CommHook.load_state_dict`.

        Raises:
            StateError: the state is of another class, model, schedule or sharding.
        """
        check_checkpoint(
            state_dict, str(self.schedule), self._fragments, self._buffers, inner=self.optim, outer=self.outer
        )
        with torch.no_grad():
            load_checkpoint(self._fragments, self._buffers, state_dict, world_change)
        self.optim.load_state_dict(state_dict["inner"])
        self.outer.load_state_dict(state_dict["outer"])
        self.count, self.landed, self._rounds.met = state_dict["count"], state_dict["landed"], True
        self._failure = None

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("an OuterOptimizer holds a process group and cannot be copied. Save its state_dict() instead")
