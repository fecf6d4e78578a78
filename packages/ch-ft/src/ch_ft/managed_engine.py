"""One step, kept or dropped: an engine whose steps the manager's vote decides.

An attempt is what lies between ``start_quorum()`` and ``should_commit()``: one backward pass or several, whose gradients
add up. What they stage becomes the state only when the manager has committed the attempt, all of it together; a
dropped one leaves residual, Q and counters as if its batches had never been seen. Within an attempt each backward goes
on from what the one before it has left, as it does with its gradients.
"""

import functools
import logging
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any, Protocol

from torch.utils.weak import WeakIdKeyDictionary

from ch_ft import protocols
from ch_ft.failfast import release
from ch_ft.transport import ManagerTransport
from commhooks import CommHooksError, HookConfigError, HookState, Reduction, RemoteHookError, TransportError
from commhooks.adapters import Engine, OptimizerWatch

log = logging.getLogger("commhooks")


class Voter(Protocol):
    """Something that takes part in an attempt's transaction."""

    def before_vote(self) -> None:
        """Everything of the attempt has been done; the last chance to report an error."""

    def after_vote(self, committed: bool) -> None:
        """The attempt counts, or it was in vain."""


class Attempts:
    """The attempts of one manager, watched on the manager itself: an :class:`~ch_ft.OptimizerWrapper`, torchft's own
    ``Optimizer`` and a loop by hand all call ``start_quorum`` and ``should_commit``, and nothing else tells a dropped
    attempt from a second backward of the same: the step number is the same for both.

    Args:
        manager: whose.

    Attributes:
        number: of the present attempt.

    Raises:
        HookConfigError: nothing can be put in the place of the manager's methods (it has ``__slots__``).
    """

    def __init__(self, manager: protocols.Transaction) -> None:
        self.number = 0
        self.voters: weakref.WeakSet[Voter] = weakref.WeakSet()
        _watch(manager, "start_quorum", self._begin)
        _watch(manager, "should_commit", self._vote)

    def _begin(self, start: Callable[[], Any]) -> Any:
        self.number += 1
        return start()

    def _vote(self, vote: Callable[[], Any]) -> Any:
        told = list(self.voters)
        for voter in told:
            voter.before_vote()
        committed = False
        try:
            committed = bool(vote())
            return committed
        finally:  # torchft raises when too many votes in a row were negative
            for voter in told:
                voter.after_vote(committed)


_ATTEMPTS = WeakIdKeyDictionary()  # manager -> Attempts


def attempts_of(manager: protocols.Transaction) -> Attempts:
    """The manager's attempts, watched from the first call on."""
    found: Attempts | None = _ATTEMPTS.get(manager)
    if found is None:
        found = _ATTEMPTS[manager] = Attempts(manager)
    return found


def _watch(manager: object, name: str, around: Callable[[Callable[[], Any]], Any]) -> None:
    """Call ``around(call)`` in the place of one of a manager's methods."""
    method = getattr(manager, name)
    function = getattr(method, "__func__", None)
    if function is not None:  # what is kept on the manager must not keep the manager: its group would outlive it
        this, method = weakref.ref(manager), None

    @functools.wraps(function or method)
    def watched(*args: Any, **kwargs: Any) -> Any:
        call = method if function is None else types.MethodType(function, this())
        return around(functools.partial(call, *args, **kwargs))

    try:
        setattr(manager, name, watched)
    except AttributeError as error:
        raise HookConfigError(
            f"{type(manager).__name__}.{name} cannot be watched ({error}); a hook has to know when a step begins and what "
            "the vote was: leave out __slots__"
        ) from error


class ManagerJudge:
    """Tells an engine if the backwards of an attempt were used: the manager votes.

    Args:
        manager: who votes.

    Attributes:
        optimizer: what ``attach(optimizer=, scaler=)`` asked for: a committed attempt may still be skipped by them.
    """

    def __init__(self, manager: protocols.Manager) -> None:
        self.optimizer: OptimizerWatch | None = None
        self._manager = manager
        self._attempts = attempts_of(manager)
        self._attempt = self._attempts.number
        self._voted: bool | None = None

    def attempt(self) -> None:
        """A backward begins, and all before it is settled: it may belong to a new attempt."""
        if self._voted is not None or self._attempt != self._attempts.number:
            self._voted, self._attempt = None, self._attempts.number

    def voted(self, committed: bool) -> None:
        """The manager has voted on the present attempt."""
        self._voted = committed

    # -- what the engine asks and says

    def begin(self) -> None:
        if self.optimizer is not None:
            self.optimizer.begin()

    def end(self) -> None:
        if self.optimizer is not None:
            self.optimizer.end()

    def used(self) -> bool | None:
        """``None`` before the vote; an attempt that was given up without one is dropped."""
        if self._voted is None:
            return None if self._attempt == self._attempts.number else False
        return self.optimizer.used() if self._voted and self.optimizer is not None else self._voted

    def doubt(self) -> CommHooksError | None:
        return self.optimizer.doubt() if self._voted and self.optimizer is not None else None

    def clock(self) -> int:
        """Committed steps, the same on every member; an optimizer of a member that came later has fewer."""
        return self._manager.current_step()

    def follow(self, clock: int) -> None:
        """Never told: every member asks the manager."""


class ManagedEngine(Engine):
    """An engine whose steps are committed by a manager.

    Args:
        reduction, transport, state: as for :class:`~commhooks.engine.engine.Engine`.
        manager: who votes.

    Attributes:
        cause: why this member cannot take part in the running step, if that is to be raised here.
    """

    transport: ManagerTransport

    def __init__(
        self,
        reduction: Reduction,
        transport: ManagerTransport,
        manager: protocols.Manager,
        state: HookState | None = None,
    ) -> None:
        self._settling = threading.RLock()
        super().__init__(reduction, transport, state, timeout=None)
        self.votes = ManagerJudge(manager)
        self.set_judge(self.votes)
        self.cause: Exception | None = None

    def begin(self) -> None:
        """Wait for the quorum, settle what came before, take over step number and membership."""
        step = self.transport.begin()
        self.resolve_step(force=True)  # after the quorum: until then a snapshot for a healing member may be being made
        self.votes.attempt()
        self.failure = None
        self.state.step = step
        self.set_participating(self.transport.participating)

    def enter(self, agreement: Callable[[], None]) -> bool:
        """:meth:`begin`, and compare the members; whether anything may be sent in this step.

        Args:
            agreement: raises if the members differ.
        """
        self.cause = None
        try:
            self.begin()
            agreement()
            self.transport.meet()  # last: members that disagree would not all be there
        except TransportError as error:
            self.failure = error
        except Exception as error:  # the members differ, or the quorum timed out
            self.cause, self.failure = error, TransportError(str(error))
        if self.failure is not None:
            self.transport.abort()
        return self.failure is None

    def lost(self, error: BaseException) -> BaseException | None:
        """The step is lost: have the attempt voted down. What is to be raised from ``backward()`` here, if anything."""
        cause, self.cause = self.cause, None
        if cause is None and isinstance(error, TransportError):
            release(error)  # the frames of its traceback hold tensors and works
            self.report(error)
            return None
        if cause is None and isinstance(error, RemoteHookError):
            log.error("this step is not committed: %s", error)
            self.report(error)
            return None
        self.report(cause or error)
        return cause or error

    def report(self, error: BaseException) -> None:
        """Nothing of this step counts, and the manager must not commit it."""
        self.rollback()
        manager = self.transport.manager
        if manager.errored() is None:
            manager.report_error(error if isinstance(error, Exception) else CommHooksError(str(error)))

    def resolve_step(self, *, force: bool = False) -> bool | None:
        """As the engine's own. Called by the quorum's thread too, when it takes a snapshot for a healing member."""
        with self._settling:
            return super().resolve_step(force=force)

    def resolve(self, committed: bool) -> None:
        """The manager has voted."""
        self.votes.voted(committed)
        self.resolve_step()

    def known_before_vote(self) -> None:
        """On CUDA, where a failure elsewhere becomes known late, make sure that it is known before the vote."""
        error = self.outcome.take_error()
        if error is not None:
            self.report(error)
