"""The outer optimizer: inner steps on each rank alone, and rounds in which all ranks move to one start.

:mod:`ch_outer.schedule` decides when fragments are exchanged, :mod:`ch_outer.fixed_ranks` and :mod:`ch_outer.members` among
which ranks, :mod:`ch_outer.shared_model` has the start, and :mod:`ch_outer.rounds` makes the exchanges.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from ch_outer.fixed_ranks import FixedRanks, FixedRounds
from ch_outer.inner_optimizer import InnerOptimizer
from ch_outer.members import Members
from ch_outer.outer_sgd import OuterFactory, warn_of_short_run
from ch_outer.parameters import local, shard_groups, write
from ch_outer.rounds import Rounds
from ch_outer.schedule import Schedule
from ch_outer.shared_model import SharedModel
from ch_outer.step_watch import Followed
from commhooks import HookConfigError, HookNotSupportedError, TraceSource


class OuterOptimizer(InnerOptimizer):
    """Steps ``optim`` on this rank alone, and exchanges the moves of its parameters between the ranks as scheduled.

    This is a real optimizer. Closures, schedulers, ``GradScaler``, gradient clipping and hooks see the groups of the inner
    optimizer. Under a ``GradScaler`` each ``scaler.step(optimizer)`` counts, also if this rank skips it for an infinite gradient.
    Ranks so stay together.

    Every rank makes the same number of ``step()`` calls, because these calls send the messages. Parameters, frozen ones too, and
    averaged buffers must be equal on all :class:`FixedRanks` at construction. They may differ on :class:`Members`.

    Each round checks that all trainable parameters and floating-point buffers of the model are exchanged. Parameters that are
    unfrozen later, in the same inner step on all ranks, join in the next round, without outer momentum.

    Args:
        optim: the inner optimizer, of any class.
        model: the model. All its trainable parameters are exchanged, whichever optimizer steps them. Step several inner
            optimizers one after another, and wrap the last. The model is plain, in DDP, or sharded by FSDP2. Shards are
            exchanged with the same shards of other groups.
        schedule: when each fragment of the parameters is exchanged. On :class:`Members`, ``overlap`` is at most
            ``every // fragments``.
        exchange: averages the pseudo-gradients: any reduction (expression, dict or object).
        outer: makes the outer optimizer of the starts. The default is ``nesterov(1.0, 0.3)``, which suits short runs. More
            momentum needs more rounds (:func:`.rounds_needed`).
        buffers: ``"average"`` averages floating-point buffers (BatchNorm's statistics) exactly after the last fragment of a
            round, so that all ranks hold one model. ``"local"`` leaves them alone. Integer buffers are always local.
        ranks: the ranks that exchange: :class:`FixedRanks`, by default those of the default process group, or
            :class:`Members` of a torchft manager, which come and go.
        steps: inner steps of the whole run, if known. The constructor then warns of too few rounds for the momentum of a given
            ``outer``. Without it, :meth:`finish` warns.
        weighted: True to average the moves of a round by weights, such as the tokens that each rank has trained on. Every rank
            then calls :meth:`weigh` in each inner step. Not on :class:`Members`.

    Attributes:
        outer: the outer optimizer of the starts, in model order. Its learning rate may be scheduled.
        count: inner steps done, skipped ones included.
        landed: exchanges that have moved a start.
        schedule: times of the exchanges.
        rounds: the exchanges.

    Raises:
        HookConfigError: an option is out of range, or the inner optimizer steps a tensor that is not a parameter of the model.
        RankMismatchError: ranks differ in options or parameters.

    Example:
        >>> import torch
        >>> from ch_core import SimulatedGroup, SimulatedTransport
        >>> model = torch.nn.Linear(3, 1)
        >>> inner = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> alone = FixedRanks(transport=SimulatedTransport(SimulatedGroup(1), 0))
        >>> optimizer = OuterOptimizer(inner, model, Schedule(every=2), ranks=alone)
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
        schedule: Schedule,
        *,
        exchange: Any = "allreduce",
        outer: OuterFactory | None = None,
        buffers: str = "average",
        ranks: FixedRanks | Members | None = None,
        steps: int | None = None,
        weighted: bool = False,
    ) -> None:
        super().__init__(optim)
        ranks = ranks or FixedRanks()
        self._shared = SharedModel(model, optim, schedule, exchange, outer, buffers, ranks, weighted)
        self.rounds: Rounds = ranks.rounds(self._shared)
        self.schedule, self.outer = self._shared.schedule, self._shared.outer
        if steps is not None and outer is not None:
            warn_of_short_run(self.outer, steps // schedule.every)
        self._warns = steps is None and outer is not None

    @property
    def count(self) -> int:
        return self.rounds.count

    @property
    def landed(self) -> int:
        return self.rounds.landed

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

    def weigh(self, n: float | torch.Tensor) -> None:
        """Set how much the next inner step counts, after ``OuterOptimizer(weighted=True)``.

        Call it on every rank before each step. A rank's moves count as the sum over its inner steps since the last round. Buffers
        are averaged without weights.

        Args:
            n: tokens or samples of the inner step, 0 or more and finite. A float, or a tensor of one element.

        Raises:
            HookNotSupportedError: the optimizer was made without ``weighted=True``.
            HookConfigError: ``n`` is not one number. A negative, infinite or NaN weight of a round, and a rank without one, raise
                it from :meth:`step` on all ranks.
        """
        if not self._shared.weighted:
            raise HookNotSupportedError(
                "weigh() needs OuterOptimizer(weighted=True) on all ranks. Without it all ranks count equally"
            )
        for fragment in self._shared.fragments:
            fragment.weigh(n)

    def before_step(self) -> bool:
        """Make the half of :meth:`step` before the inner step.

        Returns:
            True if this rank has just taken over the start of a peer. Its gradients then belong to other parameters.
        """
        self.rounds.progress.began()
        self._shared.note_thawed()
        with torch.no_grad():
            return self.rounds.meet()

    def after_step(self) -> None:
        """Count an inner step, then receive and start the exchanges that are due.

        Raises:
            CommHooksError: as :meth:`step`.
        """
        with torch.no_grad(), self.rounds.progress.exchange():
            self.rounds.after_step()

    def follow(self, *others: Optimizer, finish_after: int | None = None) -> Callable[[], None]:
        """Make outer steps whenever ``step()`` of the inner optimizer itself is called, instead of :meth:`step`.

        For code that holds the inner optimizer, such as a framework. Closures, schedulers and a ``GradScaler`` work on the inner
        optimizer as before. Do not call :meth:`step` any more. ``load_state_dict`` of the model, or of a part of it, moves the
        start to the loaded parameters, so all ranks have to load the same. Other writes to parameters count in the round.

        Args:
            others: further optimizers of the model. In each iteration they step once each, in this order, before the inner one.
            finish_after: inner steps of the run. After the last of them :meth:`finish` is called.

        Returns:
            A function that ends this.
        """

        def check() -> None:
            if self.count == finish_after:
                self.finish()

        shared = self._shared
        return Followed(self, [*others, self.optim], check, shared.model, self.rounds.load, shared.note_thawed).close

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
        if not isinstance(self.rounds, FixedRounds):
            raise HookConfigError("there is no move() under a manager, whose members come and go by themselves")
        self.rounds.move(process_group)

    # -- between steps

    @property
    def under_way(self) -> int:
        """Number of exchanges under way. At 0 a pause, for example to evaluate, gives no message more time."""
        return len(self.rounds.in_flight())

    def finish(self) -> None:
        """End the training, on all ranks. Land the exchanges under way, then exchange the remaining moves.

        All ranks then hold the start as their parameters. A fragment without an inner step since its last exchange has no
        remaining moves. A further round would only repeat the outer momentum, so there is none. Members of a manager cannot
        know this of each other, so they exchange each fragment once more.

        Raises:
            CommHooksError: as :meth:`step` does.
        """
        with torch.no_grad():
            self.rounds.finish()
        if self._warns:
            warn_of_short_run(self.outer, self.landed // self.schedule.fragments)

    @contextmanager
    def global_parameters(self) -> Iterator[None]:
        """Put the model that all ranks share in place, to evaluate or save it: the starts and the last average of the buffers.

        Example:
            >>> from ch_core import SimulatedGroup, SimulatedTransport
            >>> model, alone = torch.nn.Linear(1, 1, bias=False), SimulatedTransport(SimulatedGroup(1), 0)
            >>> inner = torch.optim.SGD(model.parameters(), lr=1.0)
            >>> optimizer = OuterOptimizer(inner, model, Schedule(every=9), ranks=FixedRanks(transport=alone))
            >>> before = model.weight.item()
            >>> model(torch.ones(1, 1)).sum().backward()
            >>> optimizer.step()
            >>> with optimizer.global_parameters():
            ...     same = model.weight.item() == before
            >>> same, model.weight.item() == before
            (True, False)
        """
        places = [(local(mine), shared) for mine, shared in self._shared.pairs()]
        own = [mine.clone() for mine, _ in places]
        try:
            write(self._shared.model, places)
            yield
        finally:
            write(self._shared.model, [(mine, before) for (mine, _), before in zip(places, own, strict=True)])

    @property
    def common(self) -> bool:
        """True if all ranks hold one model now, because a round, :meth:`finish` or a load has just put them at the start."""
        return self.count in (self.rounds.together, self.schedule.common(self.count))

    def next_common(self) -> int | None:
        """Return the number of the next inner step after which all ranks hold one model.

        ``None`` if only :meth:`finish` makes them hold one, because fragments take turns or ``mix`` keeps own parameters.
        """
        return self.schedule.common(self.count + 1)

    def stats(self) -> dict[str, float]:
        """Return the sum of all exchanges' figures (see :meth:`commhooks.CommHook.stats`), and ``rounds_done``."""
        rows = [reducer.stats() for reducer in self._shared.reducers]
        whole = float(self.landed // self.schedule.fragments)
        total = {
            key: (max if key.startswith("weight") else sum)(row[key] for row in rows if key in row) for key in rows[0]
        }
        return total | {"rounds_done": whole}

    def trace_source(self) -> TraceSource:
        """Return what a :class:`ch_trace.Trace` records: the rounds of all ranks.

        Raises:
            HookNotSupportedError: a manager, whose members come and go.
        """
        engines, groups = {}, []
        for index, fragment in enumerate(self._shared.fragments):
            binding = fragment.reducer.handle.binding
            if binding is not None and binding.engine is not None:
                engines[f"fragment {index}"] = binding.engine
                groups = (
                    [binding.group, *shard_groups(self._shared.params.values())] if binding.group is not None else []
                )
        expr = self._shared.fragments[0].reducer.handle.expr
        hook = f"outer optimizer, exchange={expr}"
        return TraceSource(engines, hook, groups, model=self._shared.model, during="inner steps")

    def report(self) -> dict[str, Any]:
        """Return figures for people, as plain values.

        ``exchange_share`` is the share of this rank's time in which steps waited for exchanges. ``apart`` has, for each exchange,
        the distance of this rank's parameters from the mean of all ranks, divided by the parameters' norm. ``apart_growth``
        compares the latest distances with the first. ``steps_alone`` counts the latest inner steps that no other rank has yet.
        ``link`` is that of ranks that are far apart.
        """
        found = {**self.rounds.progress.figures(), "steps_alone": self.rounds.steps_alone()}
        link = self.rounds.shared.reducers[0].handle.link
        return found if link is None else {**found, "link": str(link)}

    # -- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return the state from which this rank continues to the bit. All ranks save at the same step.

        Exchanges under way are received, and their averages are saved with the step at which they are due. Save the model as
        well. ``torch.load(weights_only=True)`` reads this state.

        Raises:
            RuntimeError: under a manager, if an exchange is under way, because the vote on it is open.
        """
        return {"inner": self.optim.state_dict(), **self.rounds.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any], *, world_change: str = "error") -> None:
        """Continue from :meth:`state_dict`, on all ranks. Load the model's own state as well. A refused state changes nothing.

        Args:
            state_dict: this rank's state.
            world_change: for another number of ranks, see :meth:`commhooks.CommHook.load_state_dict`.

        Raises:
            StateError: the state is of another class, model, schedule or sharding.
        """
        self._shared.check_state(state_dict)
        with torch.no_grad():
            self.rounds.load_state_dict(state_dict, world_change)
        self.optim.load_state_dict(state_dict["inner"])

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("an OuterOptimizer holds a process group and cannot be copied. Save its state_dict() instead")
