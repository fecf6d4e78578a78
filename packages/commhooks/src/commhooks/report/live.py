"""Lines about a hook while it trains: readable in a terminal, beside the bars of tqdm, and in log files."""

import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING

from ch_core import Recording
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
        self._hook, self._engines = source.hook, engines
        self._step = "step" if source.during == "backward" else "round"
        self._engine = next((engine for engine in engines if engine.reduction.lossy), engines[0])
        self._recording = Recording(steps, self._print) if steps else _Timed(1, self._print, seconds=seconds)
        self._before, self._since = self._totals(), time.perf_counter()
        self._prints = self._engine.transport.rank == 0
        if self._prints:
            self._engine.sampler.add(self._recording)

    def close(self) -> None:
        """Print the last sampled step, and no more."""
        if self._prints:
            self._prints = False
            self._engine.sampler.remove(self._recording, self._engine.counters)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _totals(self) -> tuple[float, float, float]:
        """Return steps, bytes and seconds of waiting since attach."""
        counters = [engine.counters for engine in self._engines]
        sent, waited = sum(one.traffic.wire_bytes for one in counters), sum(one.wait_seconds for one in counters)
        return float(self._engine.counters.steps), sent, waited

    def _print(self, step: int, figures: Mapping[str, float]) -> None:
        now, totals = time.perf_counter(), self._totals()
        steps, sent, waited = (after - before for after, before in zip(totals, self._before, strict=True))
        passed = now - self._since
        self._before, self._since = totals, now
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
class _Timed(Recording):
    """Samples the first step, and then one whenever some seconds have passed."""

    seconds: float = 0.0
    _next: float = 0.0

    def due(self) -> bool:
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = now + self.seconds
        return True
