"""Rounds of ranks with unequal speed. Each rank makes as many inner steps as fit into a round.

One round, where rank i has done ``w_i`` tokens of work since its last contribution::

    p_i    as many inner steps as fit
    delta  = sum of w_i * (start - p_i) / sum of w_i
    start  = outer optimizer (start, delta)
    p_i    = start

A thread of each rank sends the messages of a round. If the inner steps of a rank end later than ``grace`` allows, the thread
contributes zero, and the other ranks do not wait. The late rank keeps its moves: it adds the move of the start to its
parameters, and contributes all its moves to the next round. Unequal numbers of inner steps and weights by tokens are those of
Decoupled DiLoCo, arXiv:2604.21428, without its server.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from ch_outer.buffers import Buffers
from ch_outer.fragment import Fragment
from ch_outer.parameters import settle
from ch_outer.round_length import Pace
from ch_outer.work_count import Work
from commhooks import CommHooksError, HookConfigError, HookTimeoutError, Plain, Reducer, StateError, TransportError

COLUMNS = ("work", "steps", "busy", "waited", "ending", "here")
"""Figures of each rank that all ranks exchange in each round. The first four count since the last contribution."""


@dataclass(slots=True)
class Worker:
    """Contributions of one rank so far.

    Attributes:
        work: tokens, samples or steps.
        steps: inner steps.
        busy: seconds in inner steps.
        waited: seconds in which the rank waited for a round.
        rounds: rounds to which it contributed.
        missed: rounds that ended without it.
    """

    work: float = 0.0
    steps: int = 0
    busy: float = 0.0
    waited: float = 0.0
    rounds: int = 0
    missed: int = 0

    @property
    def speed(self) -> float:
        """Work per second of its inner steps, 0 if unknown."""
        return self.work / self.busy if self.busy else 0.0

    def as_dict(self) -> dict[str, float]:
        """Return the figures. Goodput is the work per second, waiting included."""
        whole = self.busy + self.waited
        return {
            "work": self.work,
            "steps": self.steps,
            "goodput": self.work / whole if whole else 0.0,
            "busy_share": self.busy / whole if whole else 0.0,
            "rounds": self.rounds,
            "missed": self.missed,
        }


class UnequalRounds:
    """Trains one rank between rounds that end by time.

    Args:
        fragment: all parameters.
        buffers: of the model.
        outer: steps the starts.
        pace: length of the rounds.
        model: its inputs are the work.
        obstacle: returns a reason why this rank cannot contribute, or ``None``.
        landed: called after each move of the start.
        **where: options of the reducer of the figures.

    Attributes:
        workers: contributions by rank, equal on all ranks.
        rounds: rounds so far.
    """

    def __init__(
        self,
        fragment: Fragment,
        buffers: Buffers,
        outer: Optimizer,
        pace: Pace,
        model: torch.nn.Module,
        obstacle: Callable[[], Exception | None],
        landed: Callable[[float], None],
        **where: Any,
    ) -> None:
        self._fragment, self._buffers, self._outer, self._pace = fragment, buffers, outer, pace
        self._obstacle, self._landed = obstacle, landed
        self._work = Work(model, self.begin)
        self._world = fragment.reducer.world_size
        figures = {"figures": torch.zeros(self._world, len(COLUMNS), dtype=torch.float64, device="cpu")}
        self._figures = Reducer(Plain(), figures, **where)
        self.workers = [Worker() for _ in range(self._world)]
        self.rounds = 0
        self._turn = threading.Condition()
        self._here = False  # the inner steps of this round have ended, and the main thread waits
        self._sending = False  # the messages of a round are under way
        self._ending = self._over = False
        self._missed = 0
        self._base: dict[str, torch.Tensor] | None = None  # starts that this rank's parameters still belong to
        self._error: Exception | None = None  # for the main thread
        self._lost = False  # no further round is possible
        self._steps, self._busy, self._waited, self._counted = 0, 0.0, 0.0, 0
        self._begun = self._stepped = time.monotonic()
        self._length = pace.length([])
        self._usual = 0.0  # seconds of an inner step
        self._thread: threading.Thread | None = None

    # -- the main thread

    def begin(self) -> None:
        """Begin the first round, in the first forward. The time before it does not count."""
        if self._thread is None:
            self._begun = self._stepped = time.monotonic()
            self._thread = threading.Thread(target=self._run, name="ch-outer rounds", daemon=True)
            self._thread.start()

    def after_step(self) -> None:
        """Count an inner step. Take part in a round if no further step fits into it.

        Raises:
            CommHooksError: a round failed, on all ranks.
        """
        now = time.monotonic()
        with self._turn:
            taken = now - self._stepped
            self._usual = taken if not self._usual else 0.8 * self._usual + 0.2 * taken
            self._steps, self._busy = self._steps + 1, self._busy + taken
            self._raise()
            self._catch_up()
            if self._due(now):
                self._arrive()
            self._stepped = time.monotonic()
            self._raise()

    def finish(self) -> None:
        """End on all ranks. A rank that ends early takes part in the remaining rounds, which need its messages."""
        self.begin()
        with self._turn:
            self._ending = True
            while not self._over:
                self._raise()
                while self._sending and not self._here and self._error is None:
                    self._turn.wait()
                if not self._over:
                    self._catch_up()
                    self._arrive()
            self._fragment.begin_at(self._fragment.starts)
            self._base = None

    def hold(self) -> threading.Condition:
        """Return the lock under which the starts do not move."""
        return self._turn

    def _due(self, now: float) -> bool:
        if self._sending:
            return False  # the round has closed without this rank
        if self._length is None:
            return (self._work.done - self._counted) * self._world >= self._pace.tokens or self._problem() is not None
        return now + self._usual / 2 >= self._begun + self._length

    def _problem(self) -> Exception | None:
        if self._pace.seconds or self._work.done or not self._steps:
            return None
        return HookConfigError(
            f"tokens={self._pace.tokens}: the inputs of the model were not counted, because the script calls only parts of it, "
            "or calls it without tensors. Call the model that was given to the outer optimizer, or use seconds="
        )

    def _arrive(self) -> None:
        """Wait for the round with this rank's moves."""
        begun, self._here = time.monotonic(), True
        settle(self._fragment.device)
        self._turn.notify_all()
        while self._here:
            self._turn.wait()
        self._waited += time.monotonic() - begun
        if self._error is None:
            self._fragment.begin_at(self._fragment.starts)
            self._base = None

    def _catch_up(self) -> None:
        """Add the moves of the start that were made without this rank."""
        if self._base is not None:
            self._fragment.carry(self._base)
            self._base = None

    def _raise(self) -> None:
        error = self._error
        if error is not None:
            if not self._lost:
                self._error = None
            raise error

    # -- the thread

    def _run(self) -> None:
        while not self._over and not self._lost:
            try:
                with torch.no_grad():
                    self._round()
            except Exception as error:  # of any type, because a reduction raises its own
                with self._turn:
                    self._lost = isinstance(error, (TransportError, HookTimeoutError)) or not isinstance(
                        error, CommHooksError
                    )
                    self._error, self._here, self._sending = error, False, False
                    self._begun = time.monotonic()
                    self._turn.notify_all()

    def _round(self) -> None:
        with self._turn:
            self._wait_for_this_rank()
            here, error = self._here, None
            self._sending = True
            if here:
                error = self._problem() or self._obstacle() or self._fragment.fill()
            work = float(self._work.done - self._counted)
            row = [work, self._steps, self._busy, self._waited, self._ending, True] if here else [0.0] * len(COLUMNS)
        table = self._exchange_figures(row)
        uncounted = any(one["steps"] and not one["work"] for one in table)
        weights = [one["steps" if uncounted else "work"] for one in table]
        total = sum(weights)
        buffers: dict[str, torch.Tensor] = {}
        mean: Mapping[str, torch.Tensor] | None = None
        if total:
            for tensor in self._fragment.reducer.tensors.values():
                tensor.mul_(weights[self._figures.rank] * self._world / total) if here else tensor.zero_()
            mean = self._fragment.reducer.start(error=error).wait()
            buffers = self._buffers.average(live=here)
        with self._turn:
            self._move(mean, buffers, here)
            self._note(table, weights, here)
            settle(self._fragment.device)
            self._sending = self._here = False
            self._begun = time.monotonic()
            self._length = self._pace.length([one.speed for one in self.workers])
            self._over = all(one["ending"] for one in table)
            self._turn.notify_all()

    def _wait_for_this_rank(self) -> None:
        until = None
        if self._length is not None and self._missed < self._pace.late:
            until = self._begun + self._length * (1 + self._pace.grace)
        while not self._here:
            left = None if until is None else until - time.monotonic()
            if left is not None and left <= 0:
                return
            self._turn.wait(left)

    def _exchange_figures(self, row: Sequence[float]) -> list[dict[str, float]]:
        """Return the figures of all ranks. A rank that is late has zeros."""
        mine = self._figures.tensors["figures"].zero_()
        mine[self._figures.rank] = torch.tensor(row, dtype=torch.float64, device="cpu") * self._world
        return [dict(zip(COLUMNS, one, strict=True)) for one in self._figures.start().wait()["figures"].tolist()]

    def _move(self, mean: Mapping[str, torch.Tensor] | None, buffers: Mapping[str, torch.Tensor], here: bool) -> None:
        if mean is None:
            return
        apart = self._fragment.apart() if here else float("nan")
        if not here and self._base is None:
            self._base = {name: start.clone() for name, start in self._fragment.starts.items()}
        try:
            self._fragment.move_start(self._outer)
        except Exception as error:  # a user's outer optimizer may raise here, while the peers move their starts
            self._lost = True
            raise StateError(
                f"the outer step failed on this rank ({type(error).__name__}: {error}), so its start differs from "
                "the start of its peers"
            ) from error
        self._buffers.put(buffers, live=here)
        self._landed(apart)

    def _note(self, table: Sequence[Mapping[str, float]], weights: Sequence[float], here: bool) -> None:
        for worker, one, weight in zip(self.workers, table, weights, strict=True):
            if one["here"]:
                worker.work += weight
                worker.steps += int(one["steps"])
                worker.busy += one["busy"]
                worker.waited += one["waited"]
                worker.rounds += 1
            else:
                worker.missed += 1
        self.rounds += 1
        self._missed = 0 if here else self._missed + 1
        if here:
            self._counted = self._work.done
            self._steps, self._busy, self._waited = 0, 0.0, 0.0

    @property
    def unit(self) -> str:
        """Unit of the work."""
        return self._work.unit or "steps"
