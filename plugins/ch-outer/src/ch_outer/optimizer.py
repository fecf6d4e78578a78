"""The outer optimizer: inner steps on every rank alone, now and then a step of all on what those have moved."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from ch_outer.buffers import Buffers
from ch_outer.fragment import Fragment, local, start_of
from ch_outer.handover import handed, holds, join_parts, load_parts, refuse_foreign, take
from ch_outer.inner import InnerOptimizer
from ch_outer.joining import hand_over
from ch_outer.parts import check_parameters, divide, facts_of, options_of, parameters_of, reshard, trained, write
from ch_outer.rounds import FixedRounds, ManagedRounds, Manager, Rounds
from ch_outer.schedule import Schedule
from commhooks import HookConfigError, Reducer, StateError
from commhooks.adapters import Transport

OuterFactory = Callable[[Sequence[torch.Tensor]], Optimizer]


def _nesterov(starts: Sequence[torch.Tensor]) -> Optimizer:
    return torch.optim.SGD(list(starts), lr=0.7, momentum=0.9, nesterov=True)


class OuterOptimizer(InnerOptimizer):
    """Steps ``optim`` on this rank alone; every ``every`` steps what has moved goes through a reduction to all ranks.

    A real optimizer: closures, schedulers, ``GradScaler``, gradient clipping and hooks see the inner one's groups. Under a
    ``GradScaler`` every ``scaler.step(optimizer)`` counts, also one that it skips on this rank for an infinite gradient, so
    that ranks stay together.

    Every rank makes the same number of ``step()`` calls, which is when messages are sent. Parameters, frozen ones too, and
    averaged buffers are equal on all ranks when this is made, or it raises. Over a ``manager``, whose members come and go,
    neither is asked: a newcomer is sent start, outer optimizer, buffers and counts in its first ``step()``, before its inner
    step. What is frozen it has itself.

    Args:
        optim: the inner optimizer, whatever it is.
        model: whose parameters are exchanged, all that require gradients, whoever steps them: several inner optimizers are
            stepped one after another, the one wrapped here last. Plain, in DDP, or by FSDP2 (then shards are exchanged with
            the same shards of other groups).
        every: inner steps between two exchanges of one parameter.
        exchange: what averages the pseudo-gradients: any reduction (expression, dict or object).
        outer: makes the outer optimizer of the starts; Nesterov SGD of rate 0.7 and momentum 0.9 if not given.
        fragments: how many parts of equal size take turns; or the parts, as lists of parameter names.
        overlap: inner steps that go on while an exchange is under way.
        mix: part of a rank's own parameters that stays when an exchange arrives: 0 takes the new start, 0.5 is Streaming
            DiLoCo's. What the inner steps did during the overlap is lost with 0; ``"carry"`` adds it to the new start.
        buffers: ``"average"``: floating-point buffers (BatchNorm's statistics) are averaged exactly after the last fragment
            of a round, so that all ranks hold one model; ``"local"``: they stay each rank's own. Integer ones always do.
        process_group: the ranks that exchange; with DDP or FSDP2 inside a group, those of equal place in every group.
        transport: instead of a process group, e.g. a simulated rank's.
        manager: instead of a process group, a manager under which ranks come and go: torchft's (with ch-ft installed). The
            outer optimizer calls its ``start_quorum()`` and ``should_commit()``; nothing else may. Then ``overlap`` is at most
            ``every // fragments``.
        timeout: seconds that one collective may take; those of the process group if not given. A manager has its own.
        verify_ranks: compare options, shapes and starts over the ranks first; over a manager options and shapes, in
            every round.

    Attributes:
        outer: the outer optimizer, of the starts in model order; its learning rate may be scheduled.
        count: inner steps done, skipped ones included.
        landed: exchanges that have moved a start.
        schedule: when what is exchanged.

    Raises:
        HookConfigError: an option is out of range, or the inner optimizer steps what is no parameter of the model.
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
    ) -> None:
        params = trained(model, optim)
        parts = divide(params, fragments)
        self.schedule = Schedule(every, len(parts), overlap)
        super().__init__(optim)
        starts = {name: start_of(param) for name, param in params.items()}
        self.outer = (outer or _nesterov)(list(starts.values()))
        self.count, self.landed, self._model, self._finishing = 0, 0, model, False
        self._failure: Exception | None = None  # an outer step that failed on this rank alone
        where: dict[str, Any] = {"process_group": process_group, "transport": transport, "manager": manager}
        where |= {"timeout": timeout, "verify_ranks": verify_ranks}
        self._device = next(iter(starts.values())).device
        self._fragments: list[Fragment] = []
        self._exchanged = params
        facts = facts_of(model, starts, parameters_of(model)[1], buffers, values=verify_ranks and manager is None)
        facts["outer step"] = [f"{self.schedule}, mix={mix}, buffers={buffers}", *options_of(self.outer)]
        if manager is not None:
            self._rounds: Rounds = ManagedRounds(manager, self.schedule, facts=facts, verify_ranks=verify_ranks)
        else:  # over a manager, what members begin with is sent to them
            self._rounds = FixedRounds()
        for index, names in enumerate(parts):
            mine = {name: starts[name] for name in names}
            # One state and one handle per fragment: a round of each is one committed step, whatever the others do.
            reducer = Reducer(exchange, mine, facts=facts, rounds=self._rounds.of(index), **where)
            self._fragments.append(
                Fragment({name: params[name] for name in names}, mine, reducer, mix, fixed=manager is None)
            )
        self._buffers = Buffers(model, buffers, **where)
        self._goal: int | None = None  # committed rounds after which `finish` ends, the same on all ranks
        self._taken = 0  # how often this member was behind, and was sent what the others have
        if manager is not None:
            manager.register_state_dict_fn("ch_outer", self._take_over, self._hand_over)

    # -- steps

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """An inner step, and what is due after it; returns what ``closure`` did.

        Raises:
            CommHooksError: an exchange failed, on all ranks alike. The inner step is done, start and parameters are as they
                were (moved, if only buffers failed), and the next round exchanges what this one did not. After a
                TransportError or HookTimeoutError the process group is lost. (Over a manager the round is voted down.)
        """
        failed = None
        with torch.no_grad():
            began = self._meet()
            self._goal = None  # the others may end; this one does not
        loss = None if began and closure is None else self.scaled_step(closure)
        self.count += 1
        with torch.no_grad():
            try:
                self._under_way()
            except Exception as error:  # a reduction's own, too
                if not isinstance(self._rounds, ManagedRounds):
                    raise
                failed = error  # the other members only see a round that does not count, and begin the next one
            self._begin_due()
        if failed is not None:
            raise failed
        return loss

    def _begin_due(self) -> None:
        for due in self.schedule.due(self.count):
            self._round(due, overlap=self.schedule.overlap > 0)

    def _meet(self) -> bool:
        """A member's first step begins where the others are: it takes part in their round with nothing of its own. Whether
        it has taken over their start: its gradients are of other parameters then.
        """
        taken = self._taken
        while not self._rounds.met:
            before = self.landed
            self._rounds.met = self._round(0)
            if self._rounds.met and self.landed > before and self.schedule.overlap and self._goal is None:
                self.count += self.schedule.overlap  # for others who do not `finish` it is as old when it lands
                self._begin_due()
        return self._taken > taken

    def _round(self, due: int, *, overlap: bool = False) -> bool:
        """Exchange the fragment whose turn it is; whether it has landed, or, in a job's first round, all have met."""
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
        """Return why this rank cannot take part in a round. Raised before it, the error would leave the peers alone in it."""
        try:
            if self._failure is not None:
                raise self._failure
            check_parameters(self._model, self.optim, self._exchanged)
            self._buffers.check_names()
        except Exception as error:
            return error
        return None

    def _under_way(self) -> None:
        """Land what is due, advance the rest: in the order of their starts, the same on all ranks."""
        live = [(f.since, index) for index, f in enumerate(self._fragments) if f.since is not None]
        for since, index in sorted(live):
            passed = self.count - since
            if passed >= self.schedule.overlap:
                self._land(index)
                continue
            fragment = self._fragments[index]
            for _ in range(self.schedule.advances(fragment.reducer.stages, passed)):
                fragment.advance()

    def _land(self, index: int) -> bool:
        fragment, buffers, taken = self._fragments[index], {}, self._taken
        try:
            fragment.receive()
            if index == len(self._fragments) - 1:
                buffers = self._buffers.average()
        except Exception:
            if isinstance(self._rounds, ManagedRounds):
                fragment.miss()
                fragment.reducer.rollback()
            self._rounds.close()
            if fragment.waiting:  # the buffers failed, and what has come is on all ranks
                self._move_start(fragment)
            raise
        if not self._rounds.close():
            fragment.miss()
            return False
        self._move_start(fragment, healed=self._taken > taken)
        self._buffers.put(buffers)
        return True

    def _move_start(self, fragment: Fragment, *, healed: bool = False) -> None:
        try:
            fragment.land(self.outer, healed=healed)
        except (
            Exception
        ) as error:  # an outer optimizer of the user: the peers have moved their starts, this rank has not
            self._failure = StateError(
                f"the outer step of an earlier round failed on this rank ({type(error).__name__}: {error}), so its start "
                "differs from its peers': load a state_dict() on all ranks"
            )
            raise
        self.landed += 1
        reshard(self._model)

    def _hand_over(self) -> dict[str, Any]:
        """What a member that is behind is sent; what the reductions share is sent by them."""
        given = handed(self._fragments, self.outer, self._buffers)
        return {**given, "schedule": str(self.schedule), "count": self.count, "landed": self.landed, "goal": self._goal}

    def _take_over(self, given: Mapping[str, Any]) -> None:
        """This member is behind, or new. Called by the manager, before a round's exchange (a synchronous quorum) or in its vote.

        Raises:
            StateError: the others train something else.
        """
        if given["schedule"] != str(self.schedule):
            raise StateError(f"the others have {given['schedule']}, this member {self.schedule}: give all the same")
        same = holds(self._fragments, self._buffers, given)  # refuses what does not fit, before anything is taken over
        self._goal = given["goal"] if given["goal"] is not None else self._goal
        if same and self.landed == given["landed"]:
            return  # a job's first quorum heals all members but one, and they may hold the same already
        since = next((f.since for f in self._fragments if f.since is not None), self.count)
        with torch.no_grad():
            take(self._fragments, self.outer, self._buffers, given)
            reshard(self._model)
        self.count = given["count"] + self.count - since  # given when the round began
        self.landed = given["landed"]
        self._failure = None
        self._taken += 1

    # -- between steps

    @property
    def under_way(self) -> int:
        """Exchanges under way: 0 at a place where a pause, to evaluate say, gives no message more time."""
        return sum(fragment.since is not None for fragment in self._fragments)

    def finish(self) -> None:
        """At the end of training, on all ranks: land what is under way, and exchange what has moved since. Then every rank
        holds the start, and so the same parameters.
        """
        with torch.no_grad():
            for _, index in sorted((f.since, i) for i, f in enumerate(self._fragments) if f.since is not None):
                self._land(index)
            self._finishing, done = True, 0
            self._meet()
            try:  # each fragment once; over a manager again until it counts, by the rounds that all members have seen
                while self._goal is None or self._rounds.committed(self.landed) < self._goal:
                    done += self._round(done % len(self._fragments))
            finally:
                self._finishing, self._goal = False, None
            for fragment in self._fragments:
                fragment.begin_at(fragment.starts)
            reshard(self._model)

    @contextmanager
    def global_parameters(self) -> Iterator[None]:
        """The starts in the place of the parameters, and the last averages in that of the buffers: the one model that all
        ranks share, to evaluate or save.

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
        places = [(local(f.params[name]), start) for f in self._fragments for name, start in f.starts.items()]
        places += self._buffers.places()
        own = [mine.clone() for mine, _ in places]
        try:
            write(self._model, places)
            yield
        finally:
            write(self._model, [(mine, before) for (mine, _), before in zip(places, own, strict=True)])

    def move(self, process_group: dist.ProcessGroup) -> None:
        """Go on over another group of ranks: those that are left when one was lost, and newcomers.

        Every rank of the new group makes this call, a newcomer after it has made an optimizer over a group of its own (the
        options are the same everywhere). What is under way is dropped; what a checkpoint has waited for lands. The rank with
        most exchanges behind it gives start, outer optimizer, averaged buffers and counts to all, and what the reductions
        share. Who is behind it (an exchange may have come on one rank and failed on another), or new, begins at the start with
        these buffers; the others keep what they have moved, and their residuals.

        Raises:
            HookConfigError: over a manager, where this happens by itself.
            RankMismatchError: the optimizers do not belong together.
        """
        if isinstance(self._rounds, ManagedRounds):
            raise HookConfigError("over a manager members come and go by themselves: there is no move()")
        with torch.no_grad():
            for fragment in sorted(self._fragments, key=lambda f: f.since or 0):
                if fragment.waiting:
                    self._move_start(fragment)
                fragment.drop()
        for reducer in self._reducers():
            reducer.move(process_group)
        given = hand_over(self.state_dict(), (self.landed, self.count), process_group, self._device)
        behind = self.landed < given["landed"] or self.count == 0
        self.outer.load_state_dict(given["outer"])
        self.count, self.landed = given["count"], given["landed"]
        with torch.no_grad():
            join_parts(self._fragments, self._buffers, given, behind=behind)
        reshard(self._model)

    def _reducers(self) -> list[Reducer]:
        return [*(fragment.reducer for fragment in self._fragments), *self._buffers.reducers]

    def stats(self) -> dict[str, float]:
        """The exchanges' figures added up (see :meth:`commhooks.CommHook.stats`), and ``rounds_done``: whole rounds."""
        rows = [reducer.stats() for reducer in self._reducers()]
        whole = float(self.landed // len(self._fragments))
        return {key: sum(row[key] for row in rows) for key in rows[0]} | {"rounds_done": whole}

    # -- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Everything that goes on to the bit from here on this rank: at any step, on all ranks at the same.

        Exchanges under way are waited for, and what they bring is saved with the step at which it is due. Not the model:
        save that beside it. ``torch.load(weights_only=True)`` reads it.

        Raises:
            RuntimeError: over a manager, with an exchange under way, on which nobody has voted.
        """
        if self.under_way and isinstance(self._rounds, ManagedRounds):
            raise RuntimeError(
                "an exchange is under way, and the vote on it is open: save where optimizer.under_way is 0"
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
        """Go on from :meth:`state_dict`, on every rank; the model's own state is loaded beside it. One that is refused
        changes nothing.

        Args:
            state_dict: this rank's.
            world_change: for another number of ranks: see :meth:`commhooks.CommHook.load_state_dict`.

        Raises:
            StateError: it is not such a state, or of another model, schedule or sharding.
        """
        refuse_foreign(
            state_dict, str(self.schedule), self._fragments, self._buffers, inner=self.optim, outer=self.outer
        )
        with torch.no_grad():
            load_parts(self._fragments, self._buffers, state_dict, world_change)
        self.optim.load_state_dict(state_dict["inner"])
        self.outer.load_state_dict(state_dict["outer"])
        self.count, self.landed, self._rounds.met = state_dict["count"], state_dict["landed"], True
        self._failure = None

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("an OuterOptimizer holds a process group and cannot be copied: save its state_dict()")
