"""Decides if a round counts. Fixed ranks always agree; under a manager, members come and go, and vote.

A managed round lies between ``start_quorum()`` and ``should_commit()``. All members move the start. A member that did not is one
step behind, and the next quorum sends it the start of a peer. The number of committed rounds alone decides which fragment is
exchanged, and a returning member knows this number before it sends anything. The first round of a job exchanges nothing. Its
members meet and begin at one start.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch

from ch_outer.schedule import Schedule
from commhooks import CommHooksError, HookConfigError, Plain, Reducer


class Manager(Protocol):
    """Methods that an outer optimizer calls on a manager of torchft or of ch-ft's simulation."""

    def start_quorum(self) -> None:
        """Begin a round and agree on its members."""

    def num_participants(self) -> int:
        """Return how many members contribute, after the quorum."""

    def current_step(self) -> int:
        """Return the number of committed rounds, equal on all members after the quorum."""

    def should_commit(self) -> bool:
        """Vote, and return True if the round counts."""

    def register_state_dict_fn(
        self, key: str, load_state_dict: Callable[[Any], None], state_dict: Callable[[], Any]
    ) -> None:
        """Add an entry to the state that a member behind its peers receives."""


class Rounds(Protocol):
    """Decisions of an outer optimizer before and after an exchange.

    Attributes:
        met: True if this rank holds the same start as its peers.
    """

    met: bool

    def of(self, fragment: int) -> Callable[[int], int] | None:
        """Return a function from committed rounds to rounds of a fragment, or ``None`` if each fragment counts its own."""

    def open(self, due: int) -> int | None:
        """Begin a round in which fragment ``due`` has its turn. Return the fragment to exchange, or ``None`` for none."""

    def close(self) -> bool:
        """End the round after its messages or its error. Return True if it counts."""

    def committed(self, landed: int) -> int:
        """Return how many rounds have counted, equal on all ranks in an open round. This rank has seen ``landed`` of them."""


class FixedRounds:
    """Rounds of ranks that stay and began with equal parameters. All ranks raise, or the round counts."""

    met = True

    def of(self, fragment: int) -> None:
        return None

    def open(self, due: int) -> int | None:
        return due

    def close(self) -> bool:
        return True

    def committed(self, landed: int) -> int:
        return landed


class ManagedRounds:
    """Rounds on which the members of a manager vote.

    Args:
        manager: the manager.
        schedule: the times of the exchanges.
        **options: options of the reducer of the first round.

    Raises:
        HookConfigError: two exchanges would overlap.
    """

    def __init__(self, manager: Manager, schedule: Schedule, **options: Any) -> None:
        every, fragments, overlap = schedule.every, schedule.fragments, schedule.overlap
        if overlap > every // fragments:
            raise HookConfigError(
                f"overlap={overlap} with every={every} and fragments={fragments} would keep exchanges of two fragments under way "
                f"at once, and a manager votes on one round after another. Use an overlap of at most "
                f"every // fragments = {every // fragments}"
            )
        self.manager, self.fragments, self.met = manager, fragments, False
        meeting = {"meeting": torch.zeros(1, dtype=torch.float32, device="cpu")}
        self._meeting = Reducer(Plain(), meeting, manager=manager, **options)

    def of(self, fragment: int) -> Callable[[int], int]:
        turns, first = self.fragments, fragment + 1  # step 0 is the first round, which exchanges nothing
        return lambda step: max(0, (step - first + turns - 1) // turns)

    def open(self, due: int) -> int | None:
        self.manager.start_quorum()
        self.manager.num_participants()  # waits for the quorum; before it, a newcomer's step is not that of its peers
        step = self.manager.current_step()
        if step:
            return (step - 1) % self.fragments
        try:
            # Compares options. It also delays the vote, which ends torchft's serving of state, until all members have it.
            self._meeting.average()
        except CommHooksError:
            self.close()
            raise
        return None

    def close(self) -> bool:
        return self.manager.should_commit()

    def committed(self, landed: int) -> int:
        return self.manager.current_step()
