"""Exchanges of an outer optimizer: which fragment starts, advances and lands after an inner step.

:mod:`ch_outer.fixed_ranks` and :mod:`ch_outer.members` decide if a round counts.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from typing import Any

import torch

from ch_outer.fragment import Fragment
from ch_outer.parameters import reshard
from ch_outer.round_figures import Progress
from ch_outer.shared_model import SharedModel
from commhooks import StateError


class Rounds(ABC):
    """Rounds of one rank.

    Args:
        shared: the model that the rounds move.

    Attributes:
        count: inner steps done.
        landed: exchanges that have moved a start.
        together: inner steps at the last :meth:`finish` or :meth:`load`, after which all ranks hold one model.
        takeovers: how often this rank has received the start of a peer from a manager.
        progress: figures of the exchanges.
    """

    def __init__(self, shared: SharedModel) -> None:
        self.shared, self.schedule, self.progress = shared, shared.schedule, Progress()
        self.count = self.landed = self.takeovers = self.together = 0
        self._thawed: list[str] = []  # thawed parameters whose starts the exchange under way compares
        self._failure: Exception | None = None  # of an outer step that failed on this rank alone

    # -- decisions of the ranks

    @abstractmethod
    def open(self, due: int) -> int | None:
        """Begin a round in which fragment ``due`` has its turn. Return the fragment to exchange, or ``None`` for none."""

    @abstractmethod
    def close(self) -> bool:
        """End the round after its messages. Return True if it counts."""

    @abstractmethod
    def lose(self, fragment: Fragment) -> None:
        """End the round of a fragment after an error."""

    @abstractmethod
    def exchange_rest(self) -> None:
        """Exchange all moves that no peer has yet, at the end of the training."""

    def meet(self) -> bool:
        """Meet the peers before an inner step. Return True if this rank has just taken over their start."""
        return False

    # -- inner steps

    def after_step(self) -> None:
        """Count an inner step, then receive and start the exchanges that are due."""
        self.count += 1
        self._advance_exchanges()
        self._start_due()

    def finish(self) -> None:
        """Land the exchanges under way and exchange the remaining moves. All ranks then hold the start as their parameters."""
        for _, index in self.in_flight():
            self._land(index)
        self.exchange_rest()
        for fragment in self.shared.fragments:
            fragment.begin_at(fragment.starts)
        self.together = self.count
        reshard(self.shared.model)

    def load(self, loaded: Collection[int]) -> None:
        """Begin at parameters of these identities, which the script has just loaded on all ranks."""
        for fragment in self.shared.fragments:
            fragment.load(loaded)
        self.shared.thawed.clear()  # the next step notes them again
        self.together = self.count

    def in_flight(self) -> list[tuple[int, int]]:
        """Return ``(inner steps at the start, index)`` of the fragments under way, oldest first."""
        return sorted((f.since, index) for index, f in enumerate(self.shared.fragments) if f.since is not None)

    def steps_alone(self) -> int:
        """Return the number of the latest inner steps that no other rank has yet."""
        return self.count - min(map(self._shared_until, range(len(self.shared.fragments))))

    def _shared_until(self, index: int) -> int:
        """Return the inner steps of which all ranks have the moves of a fragment."""
        landed = self.shared.fragments[index].landed
        if landed is not None:
            return landed
        # Also after a state was loaded. Thawed parameters take turns with the last fragment.
        turn = min(index, self.schedule.fragments - 1)
        return self.schedule.last(turn, max(0, self.count - self.schedule.overlap))

    def _start_due(self) -> None:
        last, every = self.schedule.fragments - 1, len(self.shared.fragments)
        for due in self.schedule.due(self.count):
            for index in range(due, every if due == last else due + 1):
                self.exchange(index, overlap=self.schedule.overlap > 0)

    def _advance_exchanges(self) -> None:
        """Land the exchanges that are due and advance the others, in the order of their starts, which all ranks share."""
        for since, index in self.in_flight():
            passed = self.count - since
            if passed >= self.schedule.overlap:
                self._land(index)
                continue
            fragment = self.shared.fragments[index]
            for _ in range(self.schedule.advances(fragment.reducer.stages, passed)):
                fragment.advance()

    # -- one round

    def exchange(self, due: int, *, overlap: bool = False) -> bool:
        """Exchange the fragment that has its turn. Return True if it has landed or, in a job's first round, if all have met."""
        index = self.open(due)
        if index is None:
            return self.close()
        if index == self.schedule.fragments - 1:
            self._thawed = [*self.shared.thawed]
        try:
            self.shared.fragments[index].begin(self.count, self._obstacle())
        except Exception:
            self.close()
            raise
        return False if overlap else self._land(index)

    def _obstacle(self) -> Exception | None:
        """Return a reason why this rank cannot contribute. Raised before the round, it would leave the peers waiting in it."""
        try:
            if self._failure is not None:
                raise self._failure
            self.shared.check_model()
        except Exception as error:
            return error
        return None

    def _land(self, index: int) -> bool:
        """Receive an exchange and move the start. Return False if the members of a manager voted it down."""
        fragment, takeovers = self.shared.fragments[index], self.takeovers
        buffers: Mapping[str, torch.Tensor] = {}
        try:
            fragment.receive()
            apart = fragment.apart()
            if index == len(self.shared.fragments) - 1:
                buffers = self.shared.buffers.average()
        except Exception:
            self.lose(fragment)
            raise
        if not self.close():
            fragment.miss()
            return False
        self.move_start(fragment, healed=self.takeovers > takeovers)
        self.progress.landed(apart)
        self.shared.buffers.put(buffers)
        if index == self.schedule.fragments - 1 and self._thawed:
            self.exchange(self.shared.admit(self._thawed))
        return True

    def move_start(self, fragment: Fragment, *, healed: bool = False) -> None:
        """Move the start of a fragment by its average, and the parameters to the start. See :meth:`.Fragment.land`."""
        try:
            fragment.land(self.shared.outer, healed=healed)
        except Exception as error:  # a user's outer optimizer may raise here, while the peers move their starts
            self._failure = StateError(
                f"the outer step of an earlier round failed on this rank ({type(error).__name__}: {error}), so its start "
                "differs from that of its peers. Load a state_dict() on all ranks"
            )
            raise
        self.landed += fragment in self.shared.fragments[: self.schedule.fragments]
        reshard(self.shared.model)

    # -- state

    def state_dict(self) -> dict[str, Any]:
        """Return counts and shared model."""
        return {"count": self.count, "landed": self.landed, **self.shared.state_dict()}

    def load_state_dict(self, saved: Mapping[str, Any], world_change: str) -> None:
        """Load a state that the shared model has accepted."""
        self.shared.load_state_dict(saved, world_change)
        self.continue_from(saved)

    def continue_from(self, saved: Mapping[str, Any]) -> None:
        """Take the counts of a state, after its start is in place."""
        self.count, self.landed, self._failure = saved["count"], saved["landed"], None
