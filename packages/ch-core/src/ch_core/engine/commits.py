"""Commit or rollback of finished steps, after the judge has told if they were used."""

from collections.abc import Callable, Collection
from functools import partial
from typing import Protocol, TypeVar

import torch

from ch_core.engine.outcome import Progress, StepOutcome
from ch_core.engine.weights import StepWeights, next_reference
from ch_core.entries import Versions
from ch_core.errors import CommHooksError

T = TypeVar("T")


class StepJudge(Protocol):
    """Tells an engine if finished steps were used. An optimizer's watch and a manager's vote implement it.

    Several steps may wait for one answer. Their gradients add up, and an optimizer uses all of them or none. The engine asks
    between collectives, so it turns exceptions of a judge into an error of the next step on all ranks.
    """

    def begin_period(self) -> None:
        """Begin a period: steps that share one answer of :meth:`used`. All earlier steps have been answered."""

    def finish_step(self) -> None:
        """Finish a step of the period. Its gradients may be used from now on."""

    def used(self) -> bool | None:
        """True if the steps of the period were used, False if they were skipped, ``None`` while they wait."""

    def doubt(self) -> CommHooksError | None:
        """Return the reason if it cannot be known. All ranks then raise it, whatever :meth:`used` says."""

    def clock(self) -> int:
        """Return the number of used steps. It is equal on all ranks."""

    def set_clock(self, clock: int) -> None:
        """Set the clock to the peers' value. This rank took no part in their step."""


_ANSWERS = (True, False, None)  # used, skipped, waiting, as ranks send them


class Commits:
    """Commits finished steps to the state, or rolls them back.

    A finished step is a draft of the state until it is resolved, at the latest when the next step begins. Resolving asks the
    judge if the step was used:

    ==========  ===============================================  ============================================
    used        the step, if it is good                          earlier tentative steps
    ==========  ===============================================  ============================================
    ``True``    committed                                        kept
    ``False``   rolled back                                      undone
    ``None``    committed tentatively when the next step begins  stay tentative
    ==========  ===============================================  ============================================

    A step that is not good (:meth:`StepOutcome.good`) is always rolled back.

    Args:
        versions: entries of the state that receives the commits.

    Attributes:
        judge: tells if finished steps were used. Without a judge every finite step was.
        dropped: returns the parameters whose average the wrapper did not apply in the last finished step.
    """

    def __init__(self, versions: Versions) -> None:
        self.versions = versions
        self.judge: StepJudge | None = None
        self.dropped: Callable[[], Collection[str]] = tuple
        self._last: StepOutcome | None = None  # of the last finished step
        self._common: StepOutcome | None = None  # the same if the ranks decided it together, until the next step
        self._can_judge = True  # False if this rank contributed no data, so its own optimizer cannot tell
        self._elastic = False  # True if the group of the last step is elastic
        self._veto = False
        self._judge_error: BaseException | None = None  # first exception of the judge since the last step began
        self._peers: tuple[int, int] | None = None  # answer and clock of a peer, if this rank cannot judge

    def used_steps(self) -> int:
        """Return the number of steps that the judge saw used.

        The status adds the committed steps to it. On ranks that judge a step differently the sums differ.
        """
        return 0 if self.judge is None else self.judge.clock()

    def finish(self, outcome: StepOutcome, *, participated: bool, elastic: bool) -> None:
        """Take the outcome of a finished step, and if this rank contributed data to it.

        In an elastic group a member knows each outcome by itself. It must not ask its peers, which may be gone.
        """
        self._last, self._can_judge, self._elastic = outcome, participated or elastic, elastic
        self._common = None if outcome.alone or elastic else outcome
        judge = self.judge
        if judge is not None:
            self._ask(lambda: judge.finish_step(), None)

    def resolve(self) -> bool | None:
        """Commit or roll back the last finished step and earlier tentative ones, unless they wait for the judge.

        A rank that cannot judge presumes that the step is used. The next step brings the answer of its peers.

        Returns:
            True if the state kept the last step, False if it did not, ``None`` if the step still waits or none is unresolved.
        """
        if not self._pending:
            return None
        used = self._used()
        return None if used is None and self._can_judge else self._carry_out(used, presumed=True)

    def resolve_before_next(self) -> bool | None:
        """Commit or roll back as :meth:`resolve`, because the next step begins. A step that waits is committed tentatively."""
        return self._carry_out(self._used(), presumed=False) if self._pending else None

    def _carry_out(self, used: bool | None, *, presumed: bool) -> bool:
        """Commit or roll back by the judge's answer. Return True if the state kept the last step."""
        last, self._veto = self._unresolved, False
        kept = last is not None and last.good() and used is not False
        if kept:
            self.versions.commit(tentative=used is None, presumed=presumed, dropped=self.dropped())
        else:
            self.versions.rollback()
        if last is not None and last.weights is not None and (kept or not self._elastic):
            self._next_reference(last.weights)
        if last is not None:
            last.progress = Progress.RESOLVED
        if used is not None:
            self.versions.resolve_tentative(used)
        return kept

    def _next_reference(self, weights: StepWeights) -> None:
        """Let the reference follow the weights of a resolved step.

        Fixed ranks do so also after a step that was not kept. All of them know its weights, but a rank that contributed no data
        may resolve it otherwise than its peers. Members of an elastic group know the same weights of a committed step alone.
        """
        versions = self.versions
        if versions.reference is None and self._elastic:
            versions.refer(weights.reference)
        # From the state's reference, because a member that healed in this step has just received it.
        if versions.reference is not None:
            versions.next_reference = next_reference(versions.reference, weights.values())

    def rollback(self) -> None:
        """Treat the last finished step, and earlier tentative ones, as not used."""
        if self._pending:
            self._veto = True

    def forget(self) -> None:
        """Drop unresolved steps, because the state has been replaced. Messages between ranks stay the same."""
        if self._unresolved is not None:
            self._unresolved.progress = Progress.RESOLVED
        self._veto = False

    def begin(self, gather: Callable[[torch.Tensor], torch.Tensor]) -> BaseException | None:
        """Resolve finished steps, because the next step begins. Return an error or doubt of the judge for all ranks.

        Args:
            gather: returns every rank's tensor as one row each.
        """
        judge, common, self._common = self.judge, self._common, None
        if judge is None:
            self.resolve_before_next()
            return None
        if common is not None and common.incomplete():
            self._exchange_answers(judge, gather)
        failed = object()
        if self._ask(self.resolve_before_next, failed) is failed:
            self._veto = True  # the judge could not answer, so its steps count as skipped
            self.resolve_before_next()
        doubt = self._ask(partial(self._next_period, judge), None)
        error, self._judge_error, self._peers = self._judge_error, None, None
        return error or doubt

    def _ask(self, question: Callable[[], T], default: T) -> T:
        """Run code of the judge and return its answer. Return the default if it raises.

        Peers are in the collectives of the step, so the exception must not leave this call. :meth:`begin` of the next step
        returns the first one.
        """
        try:
            return question()
        except BaseException as error:
            self._judge_error = self._judge_error or error
            return default

    def _next_period(self, judge: StepJudge) -> BaseException | None:
        """Begin a period of the judge unless steps still wait. Return its doubt about the last one."""
        doubt = judge.doubt() if self._can_judge else None
        if self._peers is not None:
            judge.set_clock(self._peers[1])
        if not self.versions.tentative:
            judge.begin_period()
        return doubt

    @property
    def _pending(self) -> bool:
        """True if a step is to be committed or rolled back."""
        return self.versions.tentative or self._unresolved is not None

    @property
    def _unresolved(self) -> StepOutcome | None:
        return self._last if self._last is not None and self._last.progress is Progress.DECIDED else None

    def _used(self) -> bool | None:
        if self._veto:
            return False
        if self.judge is None:
            return True
        if self._can_judge:
            return self.judge.used()
        return None if self._peers is None else _ANSWERS[self._peers[0]]

    def _exchange_answers(self, judge: StepJudge, gather: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Tell ranks that contributed no data to the last step if it was used.

        Such a rank has no optimizer that knows, but the number of committed steps decides its collectives. All ranks know
        from the last status if there was such a rank, so all of them send this message or none does.
        """
        mine = (-1, 0)  # no answer
        if self._can_judge:
            skipped: tuple[bool | None, int] = (False, 0)
            used, clock = self._ask(lambda: (self._used(), judge.clock()), skipped)
            mine = _ANSWERS.index(used), clock
        rows = gather(torch.tensor(mine, dtype=torch.int64, device="cpu")).tolist()
        answers = [(int(answer), int(clock)) for answer, clock in rows if answer >= 0]
        if not self._can_judge and answers:
            self._peers = answers[0]
