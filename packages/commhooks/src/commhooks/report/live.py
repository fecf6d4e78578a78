"""Lines about a hook while it trains: readable in a terminal, beside the bars of tqdm, and in log files."""

import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING

from ch_core import Counters, Engine, Recording
from commhooks.adapters.base import leads
from commhooks.progress import interval, write_line
from commhooks.report.text import duration, size

if TYPE_CHECKING:
    from commhooks.handle import TraceSource


class Live(AbstractContextManager["Live"]):
    """Prints a line after the first step and then at an interval, on rank 0, until it is closed.

    A line has means since the line before: the time of a step, the bytes that this rank sent in it, and how long it waited
    for messages. The ratio and the error are those of the last step, see :func:`ch_trace.record`. A printed step costs a copy
    of the gradients and three passes over them.

    Args:
        source: the engines. Bytes and waits are those of all, ratio and error those of the first lossy one.
        every: steps, or seconds as in ``"10s"``.

    Raises:
        HookConfigError: ``every`` is neither.
    """

    def __init__(self, source: "TraceSource", every: "int | str") -> None:
        steps, seconds = interval(every)
        engines = list(source.engines.values())
        engine = next((engine for engine in engines if engine.reduction.lossy), engines[0])
        # No reference to an engine: the recording belongs to one, and such a cycle would keep its group after detach().
        line = _Line(source.hook, source.during, engine.counters, [one.counters for one in engines])
        self._counters, self._sampler = engine.counters, engine.sampler
        self._recording = _Spaced(steps or 1, line, seconds=seconds, first=line.begin)
        if not source.groups:
            self._recording.leads = _leads(engine)
        if not source.groups or source.leads:
            self._sampler.add(self._recording)

    def close(self) -> None:
        """Print the last sampled step, and no more."""
        self._sampler.remove(self._recording, self._counters)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _leads(engine: Engine) -> Callable[[], bool]:
    """Return a function that tells if this rank prints. It asks in every step, because the ranks of a manager change."""
    this = weakref.ref(engine)

    def now() -> bool:
        found = this()
        return found is not None and leads((), found)

    return now


class _Line:
    """Writes the figures of an engine's sampled step, with means since the line before.

    Args:
        hook: expression.
        during: see :class:`~commhooks.TraceSource`.
        own: counters of the sampled engine.
        every: counters of all engines.
    """

    def __init__(self, hook: str, during: str, own: Counters, every: Sequence[Counters]) -> None:
        self._hook, self._step = hook, "step" if during == "backward" else "round"
        self._own, self._every = own, every
        self.begin()

    def begin(self) -> None:
        """Begin the time of the next line."""
        self._before, self._since = self._totals(), time.perf_counter()

    def _totals(self) -> tuple[float, float, float]:
        """Return steps, bytes and seconds of waiting since attach."""
        sent = sum(one.traffic.wire_bytes for one in self._every)
        return float(self._own.steps), sent, sum(one.wait_seconds for one in self._every)

    def __call__(self, step: int, figures: Mapping[str, float]) -> None:
        before, passed, totals = self._before, time.perf_counter() - self._since, self._totals()
        self.begin()
        steps, sent, waited = (after - earlier for after, earlier in zip(totals, before, strict=True))
        if steps <= 0:
            return
        parts = [
            f"{self._hook}: {self._step} {totals[0]:.0f}, {duration(passed / steps)} each",
            f"sent {size(sent / steps)}" + (f", ratio {figures['ratio']:.1f}" if "ratio" in figures else ""),
            f"waited {duration(waited / steps)} ({waited / passed:.0%})",
        ]
        if "relative_error" in figures:
            parts.append(f"error {figures['relative_error']:.3f}")
        write_line("; ".join(parts))


@dataclass(slots=True, eq=False)
class _Spaced(Recording):
    """Samples the first step, and then one at an interval of steps or seconds.

    Attributes:
        seconds: of the interval; 0 if it is ``every`` steps.
        first: called when the first step begins. What the script did before is no part of the first line.
        leads: True if this rank prints.
    """

    seconds: float = 0.0
    first: Callable[[], None] = lambda: None
    leads: Callable[[], bool] = lambda: True
    _next: float = 0.0

    def due(self) -> bool:
        if self._steps == 0:
            self.first()
        now = time.monotonic()
        if not Recording.due(self) or now < self._next or not self.leads():  # no super() in a class with slots
            return False
        self._next = now + self.seconds
        return True
