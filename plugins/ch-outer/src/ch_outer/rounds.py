"""Who decides about a round: nobody, where the ranks stay; a manager's vote, where members come and go.

A round over a manager lies between its ``start_quorum()`` and its ``should_commit()``. All members move the start, or those that
did not are behind by a step, and the next quorum sends them the others' start. Which fragment is exchanged follows from the
number of committed rounds alone, which a member that comes back knows before anything is sent. The first round of a job
exchanges nothing: its members meet, and begin at one start.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch

from ch_outer.schedule import Schedule
from commhooks import CommHooksError, HookConfigError, Plain, Reducer


class Manager(Protocol):
    """What is asked of a manager: torchft's, or ch-ft's simulated one. What its reductions need besides, ch-ft asks for."""

    def start_quorum(self) -> None:
        """Begin a round: agree on the members."""

    def num_participants(self) -> int:
        """How many contribute; waits for the quorum."""

    def current_step(self) -> int:
        """Committed rounds, the same on all members once the quorum is there."""

    def should_commit(self) -> bool:
        """Vote: whether the round counts."""

    def register_state_dict_fn(
        self, key: str, load_state_dict: Callable[[Any], None], state_dict: Callable[[], Any]
    ) -> None:
        """Add to what a member that is behind is sent."""


class Rounds(Protocol):
    """What an outer optimizer asks before and after an exchange.

    Attributes:
        met: whether this rank holds the start of the others.
    """

    met: bool

    def of(self, fragment: int) -> Callable[[int], int] | None:
        """Committed rounds -> how many of them were a fragment's; ``None`` where a fragment's rounds are counted by itself."""

    def open(self, due: int) -> int | None:
        """A round begins in which fragment ``due`` has its turn: the one to exchange, ``None`` if nothing is."""

    def close(self) -> bool:
        """Everything of the round has come, or its error: whether it counts."""

    def committed(self, landed: int) -> int:
        """How many rounds have counted: the same on all ranks once a round is open. This one has seen ``landed`` land."""


class FixedRounds:
    """Ranks that stay, and began with equal parameters: all of them raise, or the round counts."""

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
    """Rounds that a manager's members vote on.

    Args:
        manager: whose.
        schedule: when what is exchanged.
        **options: of the reducer over which members meet.

    Raises:
        HookConfigError: exchanges of two fragments would be under way at once.
    """

    def __init__(self, manager: Manager, schedule: Schedule, **options: Any) -> None:
        every, fragments, overlap = schedule.every, schedule.fragments, schedule.overlap
        if overlap > every // fragments:
            raise HookConfigError(
                f"overlap={overlap} with every={every} and fragments={fragments}: exchanges of two fragments would be under way "
                f"at once, and a manager votes on one round after another. Over a manager overlap is at most "
                f"every // fragments = {every // fragments}"
            )
        self.manager, self.fragments, self.met = manager, fragments, False
        self._meeting = Reducer(
            Plain(), {"meeting": torch.zeros(1, dtype=torch.float32, device="cpu")}, manager=manager, **options
        )

    def of(self, fragment: int) -> Callable[[int], int]:
        turns, first = self.fragments, fragment + 1  # step 0 is the meeting
        return lambda step: max(0, (step - first + turns - 1) // turns)

    def open(self, due: int) -> int | None:
        self.manager.start_quorum()
        self.manager.num_participants()  # waits: the step below is a newcomer's only then
        step = self.manager.current_step()
        if step:
            return (step - 1) % self.fragments
        try:
            # Options are compared; and a vote ends what torchft serves, so nobody may vote before all have been sent it.
            self._meeting.average()
        except CommHooksError:
            self.close()
            raise
        return None

    def close(self) -> bool:
        return self.manager.should_commit()

    def committed(self, landed: int) -> int:
        return self.manager.current_step()
