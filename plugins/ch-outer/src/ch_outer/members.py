"""Rounds over a manager of torchft, whose members come and go, and vote on each round.

A round lies between ``start_quorum()`` and ``should_commit()``. All members move the start. A member that did not is one
step behind, and the next quorum sends it the start of a peer. The number of committed rounds alone decides which fragment is
exchanged, and a returning member knows this number before it sends anything. The first round of a job exchanges nothing. Its
members meet and begin at one start.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch

from ch_outer.fragment import Fragment
from ch_outer.parameters import reshard
from ch_outer.rounds import Rounds
from ch_outer.shared_model import SharedModel
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


@dataclass(frozen=True, slots=True)
class Members:
    """Members of a manager, which may die and come back at any time.

    Parameters may differ at the beginning. A new member receives start, outer optimizer, buffers and counts in its first
    ``step()``, before its inner step. It must bring frozen parameters itself.

    Args:
        manager: torchft's Manager (with ch-ft installed). Only the outer optimizer may call its ``start_quorum()`` and
            ``should_commit()``. Its time-outs apply.
        verify_ranks: True to compare options and shapes in each round.
    """

    manager: Manager
    verify_ranks: bool = True

    @property
    def fixed(self) -> bool:
        return False

    def reducer_options(self) -> dict[str, Any]:
        return {"manager": self.manager, "verify_ranks": self.verify_ranks}

    def turns(self, fragment: int, fragments: int) -> Callable[[int], int]:
        first = fragment + 1  # step 0 is the first round, which exchanges nothing
        return lambda step: max(0, (step - first + fragments - 1) // fragments)

    def rounds(self, shared: SharedModel) -> "MemberRounds":
        return MemberRounds(shared, self)


class MemberRounds(Rounds):
    """Rounds on which :class:`Members` vote.

    Args:
        shared: the model that the rounds move.
        members: the members.

    Raises:
        HookConfigError: two exchanges would overlap.
    """

    def __init__(self, shared: SharedModel, members: Members) -> None:
        super().__init__(shared)
        every, fragments, overlap = self.schedule.every, len(shared.fragments), self.schedule.overlap
        if overlap > every // fragments:
            raise HookConfigError(
                f"overlap={overlap} with every={every} and fragments={fragments} would keep exchanges of two fragments under way "
                f"at once, and a manager votes on one round after another. Use an overlap of at most "
                f"every // fragments = {every // fragments}"
            )
        self._manager = members.manager
        self._met = False  # this member holds the same start as its peers
        self._finishing = False
        self._goal: int | None = None  # committed rounds after which `finish` ends, equal on all members
        meeting = {"meeting": torch.zeros(1, dtype=torch.float32, device="cpu")}
        self._meeting = Reducer(Plain(), meeting, facts=shared.facts, **members.reducer_options())
        self._manager.register_state_dict_fn("ch_outer", self.take_over, self.hand_over)

    # -- one round

    def open(self, due: int) -> int | None:
        self._manager.start_quorum()
        self._manager.num_participants()  # waits for the quorum; before it, a newcomer's step is not that of its peers
        step = self._manager.current_step()
        if not step:
            try:
                # Compares options. It also delays the vote, which ends torchft's serving of state, until all members have it.
                self._meeting.average()
            except CommHooksError:
                self.close()
                raise
        if self._finishing and self._goal is None:
            self._goal = step + len(self.shared.fragments)
        return (step - 1) % len(self.shared.fragments) if step else None

    def close(self) -> bool:
        return self._manager.should_commit()

    def lose(self, fragment: Fragment) -> None:
        fragment.miss()
        fragment.reducer.rollback()
        self.close()

    # -- inner steps

    def meet(self) -> bool:
        """Take part in a round of the peers before a member's first step. Return True if the member took over their start."""
        took_over = self._meet()
        self._goal = None  # peers may finish, this member does not
        return took_over

    def _meet(self) -> bool:
        takeovers = self.takeovers
        while not self._met:
            before = self.landed
            self._met = self.exchange(0)
            if self._met and self.landed > before and self.schedule.overlap and self._goal is None:
                self.count += self.schedule.overlap  # peers that do not finish have made these steps since the exchange
                self._start_due()
        return self.takeovers > takeovers

    def after_step(self) -> None:
        self.count += 1
        failed = None
        try:
            self._advance_exchanges()
        except Exception as error:  # any type, because a reduction raises its own
            failed = error  # the other members only see a lost round and begin the next one, as must this member
        self._start_due()
        if failed is not None:
            raise failed

    def exchange_rest(self) -> None:
        """Exchange each fragment once.

        Members cannot know of each other if moves remain. A lost round is repeated, and all members count the committed ones.
        """
        self._finishing, done = True, 0
        self._meet()
        try:
            while self._goal is None or self._manager.current_step() < self._goal:
                done += self.exchange(done % len(self.shared.fragments))
        finally:
            self._finishing, self._goal = False, None

    # -- state

    def hand_over(self) -> dict[str, Any]:
        """Return copies for a member that is behind. torchft serves them while training continues.

        Reductions send their shared state themselves.
        """
        shared = self.shared
        return {
            "outer": copy.deepcopy(shared.outer.state_dict()),
            "starts": [
                {name: start.clone() for name, start in fragment.starts.items()} for fragment in shared.fragments
            ],
            "buffers": {name: buffer.clone() for name, buffer in shared.buffers.shared.items()},
            "schedule": asdict(self.schedule),
            "count": self.count,
            "landed": self.landed,
            "goal": self._goal,
        }

    def take_over(self, given: Mapping[str, Any]) -> None:
        """Load a peer's state. The manager calls this before a round's exchange (a synchronous quorum) or in its vote.

        Raises:
            StateError: the peer trains another model or uses another schedule.
        """
        fragments = self.shared.fragments
        self.shared.check_schedule("the peers use", given["schedule"])
        same = self._equals(given)  # refuses another model before anything changes
        self._goal = given["goal"] if given["goal"] is not None else self._goal
        if same and self.landed == given["landed"]:
            return  # a job's first quorum heals all members but one, also members that are equal already
        since = next((f.since for f in fragments if f.since is not None), self.count)
        with torch.no_grad():
            for fragment, starts in zip(fragments, given["starts"], strict=True):
                fragment.begin_at(starts)
            self.shared.buffers.put(given["buffers"])
            self.shared.outer.load_state_dict(given["outer"])
            reshard(self.shared.model)
        ahead = given["count"] - since  # the peer counted its steps when the round started
        for fragment in fragments:
            fragment.renumber(ahead)
        self.continue_from({"count": self.count + ahead, "landed": given["landed"]})
        self.takeovers += 1

    def _equals(self, given: Mapping[str, Any]) -> bool:
        """Return True if starts and shared buffers equal those of a peer."""
        buffers = self.shared.buffers
        buffers.check({"shared": given["buffers"]})
        same = all(torch.equal(own, given["buffers"][name].to(own.device)) for name, own in buffers.shared.items())
        for fragment, starts in zip(self.shared.fragments, given["starts"], strict=True):
            fragment.check({"start": starts, "mean": {}, "left": {}, "rest": {}})
            same &= all(torch.equal(start, starts[name].to(start.device)) for name, start in fragment.starts.items())
        return same

    def state_dict(self) -> dict[str, Any]:
        if self.in_flight():
            raise RuntimeError(
                "an exchange is under way, and the vote on it is open. Save where optimizer.under_way is 0"
            )
        return super().state_dict()

    def load_state_dict(self, saved: Mapping[str, Any], world_change: str) -> None:
        super().load_state_dict(saved, world_change)
        self._met = True
