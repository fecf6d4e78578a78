"""Finished steps whose end is open: used by the optimizer, or skipped, or waiting to be used with the next ones."""

from collections.abc import Callable

import torch

from commhooks.engine.outcome import Phase, StepOutcome
from commhooks.engine.status import StepJudge
from commhooks.state import HookState

_ANSWERS = (True, False, None)  # used, skipped, open: as ranks tell one another


class OpenSteps:
    """The last finished step of an engine, those that wait with it, and what becomes of them.

    A step is staged while it runs. When the next begins it is committed or rolled back; if its gradients still wait to
    be used, it is committed tentatively, on top of those before it, and all of them are kept or undone together.

    Args:
        state: what is committed.

    Attributes:
        judge: says whether finished steps were used; ``None``: every one that is finite was.
    """

    def __init__(self, state: HookState) -> None:
        self.state = state
        self.judge: StepJudge | None = None
        self._last: StepOutcome | None = None  # on the last finished step
        self._common: StepOutcome | None = None  # the same, if the ranks decided it together, until the next step
        self._waiting: list[StepOutcome] = []  # committed tentatively
        self._took_part = True
        self._veto = False
        self._judge_error: BaseException | None = None
        self._told: tuple[int, int] | None = None  # by the others, of a step that this rank took no part in

    def used_steps(self) -> int:
        """Steps that the judge saw used. With the committed steps they are this rank's clock in the status.

        Ranks that judge a step differently have different clocks.
        """
        return 0 if self.judge is None else self.judge.clock()

    def ended(self, outcome: StepOutcome, *, elastic: bool) -> None:
        """A step has ended. In an ``elastic`` group each member knows the outcome, and asks nobody, who may be gone."""
        self._last, self._took_part = outcome, outcome.counted or elastic
        self._common = None if outcome.alone or elastic else outcome
        if self.judge is not None:
            try:
                self.judge.end()
            except BaseException as error:  # the status has been sent: all ranks raise it at the end of the next step
                self._judge_error = error

    def settle(self, *, force: bool = False) -> bool | None:
        """Commit or roll back what is open; returns whether the last step was kept, ``None`` if it stays open.

        Args:
            force: the next step begins. What is open even now, because its gradients wait to be used together with
                the next ones, is committed tentatively: the next step goes on from it.
        """
        last = self._pending
        if last is None and not self.state.tentative:
            return None
        used = self._used()
        if used is None and not force and self._took_part:
            return None
        self._veto = False
        if last is not None and last.good() and used is not False:
            # A rank that took no part presumes that the step is used, until the next one tells.
            self.state.commit(tentative=used is None, presumed=not force)
            last.end(Phase.TENTATIVE if used is None else Phase.COMMITTED)
            self._waiting += [last] if used is None else []
            kept = True
        else:
            self.state.rollback()
            if last is not None:
                last.end(Phase.ROLLED_BACK)
            kept = False
        if used is not None:
            self.state.resolve(used)
            for outcome in self._waiting:
                outcome.end(Phase.COMMITTED if used else Phase.ROLLED_BACK)
            self._waiting.clear()
        return kept

    def rollback(self) -> None:
        """What is open was not used."""
        if self.state.tentative or self._pending is not None:
            self._veto = True

    def forget(self) -> None:
        """The state has been replaced, and what is open with it. What ranks ask one another stays the same."""
        for outcome in (*self._waiting, *([self._pending] if self._pending is not None else [])):
            outcome.end(Phase.ROLLED_BACK)
        self._waiting.clear()
        self._veto = False

    def answer(self, gather: Callable[[torch.Tensor], torch.Tensor]) -> BaseException | None:
        """The next step begins: settle. Return the judge's error or doubt, which the engine raises on all ranks.

        Args:
            gather: every rank's tensor, one row each.
        """
        if self.judge is None:
            self.settle(force=True)
            return None
        judge, common = self.judge, self._common
        error, self._judge_error, self._common = self._judge_error, None, None
        if common is not None and common.incomplete():
            used: bool | None = False
            clock = 0
            try:  # the peers already wait in this message
                used, clock = (self._used(), judge.clock()) if self._took_part else (None, 0)
            except BaseException as raised:
                error = error or raised
            self._ask_others(used, clock, gather)
        try:
            self.settle(force=True)
        except BaseException as raised:  # the judge cannot tell: its steps count as skipped
            error, self._veto = error or raised, True
            self.settle(force=True)
        try:
            doubt: BaseException | None = judge.doubt() if self._took_part else None
            if self._told is not None:
                judge.follow(self._told[1])
            if not self.state.tentative:
                judge.begin()
        except BaseException as raised:
            doubt = raised
        self._told = None
        return error or doubt

    @property
    def _pending(self) -> StepOutcome | None:
        """The outcome on the last finished step, if that is neither committed nor rolled back."""
        return self._last if self._last is not None and self._last.phase is Phase.DECIDED else None

    def _used(self) -> bool | None:
        if self._veto:
            return False
        if self.judge is None:
            return True
        if self._took_part:
            return self.judge.used()
        return None if self._told is None else _ANSWERS[self._told[0]]

    def _ask_others(self, used: bool | None, clock: int, gather: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Where a rank took no part in the last step, the others tell it what became of the step.

        It has no optimizer that would know, but the number of committed steps decides about its collectives. From the
        last status all ranks know whether there was one, so that all of them send this message, or none.
        """
        answer = _ANSWERS.index(used) if self._took_part else -1
        everyone = gather(torch.tensor([answer, clock], dtype=torch.int64, device="cpu")).tolist()
        told = [(int(answer), int(clock)) for answer, clock in everyone if answer >= 0]
        if not self._took_part and told:
            self._told = told[0]
