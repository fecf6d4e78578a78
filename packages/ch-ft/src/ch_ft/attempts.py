"""Commit or drop steps by the manager's vote.

An attempt lies between ``start_quorum()`` and ``should_commit()``. It has one or more backwards, whose gradients add
up. State that they stage becomes final only when the manager commits the attempt, all of it together. A dropped
attempt leaves residual, Q and counters as if its batches had never been seen. Within an attempt each backward
continues from the state of the last one.
"""

import functools
import logging
import types
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch.utils.weak import WeakIdKeyDictionary

from ch_core import Engine
from ch_ft.fail_fast import release
from ch_ft.manager import Manager, Transaction
from ch_ft.optimizer import OptimizerWrapper
from ch_ft.transport import ManagerTransport
from commhooks import (
    AttachError,
    AttachOptions,
    CommHooksError,
    HookConfigError,
    OptimizerWatch,
    RemoteHookError,
    TransportError,
    finds_optimizers,
)

log = logging.getLogger("commhooks")


class Voter(Protocol):
    """Part of an attempt that must know the vote."""

    def before_vote(self) -> None:
        """Report an error of the attempt to the manager. This is the last chance."""

    def after_vote(self, committed: bool) -> None:
        """Resolve the attempt."""


class Attempts:
    """Counts the attempts of one manager and tells voters of each vote.

    It wraps the manager's own methods, because :class:`~ch_ft.OptimizerWrapper`, torchft's ``Optimizer`` and a loop
    by hand all call ``start_quorum`` and ``should_commit``. The step number cannot tell a repeated attempt from a
    second backward.

    Args:
        manager: manager to watch.

    Attributes:
        number: number of the current attempt.
        voters: called before and after each vote.
        leaving: detached voters of the current attempt. They live until its vote.

    Raises:
        HookConfigError: the manager's methods cannot be replaced, because it has ``__slots__``.
    """

    def __init__(self, manager: Transaction) -> None:
        self.number = 0
        self.voters: weakref.WeakSet[Voter] = weakref.WeakSet()
        self.leaving: list[Voter] = []
        _watch(manager, "start_quorum", self._begin)
        _watch(manager, "should_commit", self._vote)

    def _begin(self, start: Callable[[], Any]) -> Any:
        self.number += 1
        for voter in self._left():  # their attempt ended without a vote
            voter.after_vote(False)
        return start()

    def _vote(self, vote: Callable[[], Any]) -> Any:
        voters = list(self.voters)
        for voter in voters:
            voter.before_vote()
        committed = False
        try:
            committed = bool(vote())
            return committed
        finally:  # torchft raises after too many negative votes in a row
            for voter in voters:
                voter.after_vote(committed)
            self._left()

    def _left(self) -> list[Voter]:
        """Forget the detached voters, and return them."""
        left, self.leaving = self.leaving, []
        self.voters.difference_update(left)
        return left


_ATTEMPTS = WeakIdKeyDictionary()  # manager -> Attempts


def attempts_of(manager: Transaction) -> Attempts:
    """Return the attempts of a manager, watched from the first call on."""
    found: Attempts | None = _ATTEMPTS.get(manager)
    if found is None:
        found = _ATTEMPTS[manager] = Attempts(manager)
    return found


def _watch(manager: object, name: str, around: Callable[[Callable[[], Any]], Any]) -> None:
    """Replace one method of a manager by ``around(method)``."""
    method = getattr(manager, name)
    function = getattr(method, "__func__", None)
    if function is not None:  # a strong reference from the manager to itself would keep its process group alive
        this, method = weakref.ref(manager), None

    @functools.wraps(function or method)
    def watched(*args: Any, **kwargs: Any) -> Any:
        call = method if function is None else types.MethodType(function, this())
        return around(functools.partial(call, *args, **kwargs))

    try:
        setattr(manager, name, watched)
    except AttributeError as error:
        raise HookConfigError(
            f"{type(manager).__name__}.{name} cannot be watched ({error}). A hook must know when a step begins and the "
            "result of the vote: leave out __slots__"
        ) from error


class ManagerJudge:
    """Tells an engine if the backwards of an attempt were used. The manager's vote decides.

    Args:
        manager: manager that votes.
        optimizer: watch of the optimizer and scaler given to ``attach``. They may skip a committed attempt.
    """

    def __init__(self, manager: Manager, optimizer: OptimizerWatch | None = None) -> None:
        self.optimizer = optimizer
        self._manager = manager
        self._attempts = attempts_of(manager)
        self._attempt = self._attempts.number
        self._voted: bool | None = None

    def begin_backward(self) -> None:
        """Begin a backward after earlier ones are resolved. It may belong to a new attempt."""
        if self._voted is not None or self._attempt != self._attempts.number:
            self._voted, self._attempt = None, self._attempts.number

    def vote(self, committed: bool) -> None:
        """Take the vote on the current attempt."""
        self._voted = committed

    # -- the engine's questions

    def begin_period(self) -> None:
        if self.optimizer is not None:
            self.optimizer.begin_period()

    def finish_step(self) -> None:
        if self.optimizer is not None:
            self.optimizer.finish_step()

    def used(self) -> bool | None:
        """Return ``None`` before the vote, and False for an attempt that ended without one."""
        if self._voted is None:
            return None if self._attempt == self._attempts.number else False
        return self.optimizer.used() if self._voted and self.optimizer is not None else self._voted

    def doubt(self) -> CommHooksError | None:
        return self.optimizer.doubt() if self._voted and self.optimizer is not None else None

    def clock(self) -> int:
        """Return the number of committed steps. A newcomer's optimizer has counted fewer."""
        return self._manager.current_step()

    def set_clock(self, clock: int) -> None:
        """Do nothing: every member asks the manager."""


class ManagedSteps:
    """Runs the steps of one engine as attempts of a manager.

    Args:
        engine: engine whose steps the manager commits.
        transport: transport of that engine.
        manager: manager that votes.
        options: arguments of ``attach``.
        params: returns the present parameters of the model.

    Attributes:
        attempts: attempts of the manager.
        watch: watch of the optimizer and scaler in ``options``, ``None`` without them.

    Raises:
        AttachError: the optimizer in ``options`` votes with another manager.
    """

    def __init__(
        self,
        engine: Engine,
        transport: ManagerTransport,
        manager: Manager,
        options: AttachOptions | None = None,
        params: Callable[[], Iterable[torch.Tensor]] = tuple,
    ) -> None:
        self.engine, self.transport, self.manager = engine, transport, manager
        self._rounds = options.rounds if options is not None else None
        self.watch = _watch_optimizer(manager, options, params) if options is not None else None
        if self.watch is not None and options is not None and options.scaler is not None:
            engine.set_loss_scale(self.watch.scale)
        self._judge = ManagerJudge(manager, self.watch)
        engine.set_judge(self._judge)
        self._cause: Exception | None = None
        self.attempts = attempts_of(manager)
        self.attempts.voters.add(self)

    def enter(self, agreement: Callable[[], None]) -> bool:
        """Begin a backward: wait for the quorum, resolve earlier steps, and compare the members.

        Args:
            agreement: raises if members differ.

        Returns:
            True if this member may send in this step.
        """
        self._cause = None
        failure: BaseException | None = None
        try:
            self._begin()
            agreement()
            self.transport.meet()  # last, because members that disagree would not all be there
        except TransportError as error:
            failure = error
        except Exception as error:  # members differ, or the quorum timed out
            self._cause, failure = error, TransportError(str(error))
        self.engine.set_failure(failure)
        if failure is not None:
            self.transport.abort()
        return failure is None

    def lost(self, error: BaseException) -> BaseException | None:
        """Vote the attempt down. Return the error to raise from ``backward()`` on this member, if any.

        A lost peer or an error of another member raises nothing here. The next attempt repeats the step.
        """
        cause, self._cause = self._cause, None
        if cause is None and isinstance(error, TransportError):
            release(error)  # the frames of its traceback keep tensors and works alive
            self.report(error)
            return None
        if cause is None and isinstance(error, RemoteHookError):
            log.error("this step is not committed: %s", error)
            self.report(error)
            return None
        self.report(cause or error)
        return cause or error

    def report(self, error: BaseException) -> None:
        """Drop the step here, and have the manager vote it down."""
        self.engine.rollback()
        if self.manager.errored() is None:
            self.manager.report_error(error if isinstance(error, Exception) else CommHooksError(str(error)))

    def before_vote(self) -> None:
        """Report an error that became known after the step. On a GPU the host reads the status late."""
        error = self.engine.outcome.take_error()
        if error is not None:
            self.report(error)

    def after_vote(self, committed: bool) -> None:
        self._judge.vote(committed)
        self.engine.resolve_step()

    def close(self) -> None:
        """Take part in no vote after that of the current attempt, which decides the backwards that have run."""
        if self.watch is not None:
            self.watch.close()
            self._judge.optimizer = None  # a closed watch sees no step, so the vote alone decides
        if self._judge.used() is None:
            self.attempts.leaving.append(self)
        else:
            self.attempts.voters.discard(self)

    def _begin(self) -> None:
        step = self.transport.begin()
        # Only after the quorum: until then its thread may take a snapshot for a healing member.
        self.engine.resolve_before_next_step()
        self._judge.begin_backward()
        self.engine.set_failure(None)
        self.engine.state.step = step if self._rounds is None else self._rounds(step)
        self.engine.set_participating(self.transport.participating)


def _watch_optimizer(
    manager: Manager, options: AttachOptions, params: Callable[[], Iterable[torch.Tensor]]
) -> OptimizerWatch | None:
    if isinstance(options.optimizer, OptimizerWrapper) and options.optimizer.manager is not manager:
        raise AttachError(
            "the OptimizerWrapper given as optimizer= votes with another manager than the model's: give both the same one"
        )
    if (options.optimizer is None or finds_optimizers(options.optimizer)) and options.scaler is None:
        return None  # the vote alone decides
    return OptimizerWatch(options.optimizer, options.scaler, params)
