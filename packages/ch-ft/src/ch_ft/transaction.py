"""One step, kept or dropped: an engine that asks the manager what became of the step.

A step is staged during backward and becomes the state only when the manager has committed it, which is the same as
``manager.current_step()`` having grown. Whoever settles the step (the optimizer wrapper right after the vote, a
checkpoint, the next step's first bucket) therefore comes to the same end; a dropped step leaves residual, Q and
counters as if the batch had never been seen.
"""

import threading
import weakref
from typing import Protocol

from torch.utils.weak import WeakIdKeyDictionary

from ch_ft import protocols
from ch_ft.transport import ManagerTransport
from commhooks.engine import Engine
from commhooks.reduction import Reduction
from commhooks.state import HookState


class ManagedEngine(Engine):
    """An engine whose steps are committed by a manager.

    Args:
        reduction, transport, state: as for :class:`~commhooks.engine.Engine`.
    """

    transport: ManagerTransport

    def __init__(self, reduction: Reduction, transport: ManagerTransport, state: HookState | None = None) -> None:
        self._settling = threading.RLock()
        self.attempted = -1  # manager.current_step() when the last attempt began
        super().__init__(reduction, transport, state, timeout=None)

    def begin(self) -> None:
        """Wait for the quorum, settle the step before, take over step number and membership."""
        step = self.transport.begin()
        self.settle()  # after the quorum: until then a snapshot for a healing member may be being made of the state
        self.failure = None
        self.attempted = self.state.step = step
        self.participating = self.transport.participating

    def settle(self, *, finally_: bool = False) -> bool | None:
        """Commit the last finished step if the manager has, else roll it back; ``None`` if nothing is open.

        Called by the quorum's thread too, when it takes a snapshot for a healing member.
        """
        with self._settling:
            if self.transport.manager.current_step() <= self.attempted:
                self.rollback()
            return super().settle(finally_=finally_)

    def resolve(self, committed: bool) -> None:
        """The manager has voted."""
        if not committed:
            self.rollback()
        self.settle()


class Voter(Protocol):
    """Something that takes part in a step's transaction."""

    def before_vote(self) -> None:
        """Everything of the step has been done; the last chance to report an error."""

    def after_vote(self, committed: bool) -> None:
        """The step counts, or it was in vain."""


_VOTERS = WeakIdKeyDictionary()  # manager -> WeakSet of Voter


def enrol(manager: protocols.Reducer, voter: Voter) -> None:
    """Let ``voter`` be told of every step of ``manager`` that an :class:`~ch_ft.OptimizerWrapper` ends."""
    if manager not in _VOTERS:
        _VOTERS[manager] = weakref.WeakSet()
    _VOTERS[manager].add(voter)


def voters(manager: protocols.Reducer) -> list[Voter]:
    """Who is to be told."""
    return list(_VOTERS.get(manager, ()))
