"""Records figures of an outer optimizer's exchanges over time, with the writers of :mod:`ch_trace`."""

import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from types import TracebackType

from ch_trace import Writer

log = logging.getLogger("commhooks")

COLUMNS = ("inner_steps", "apart", "exchange_seconds", "payload_bytes", "wire_bytes")
"""Figures of an exchange."""


class Recorder(AbstractContextManager["Recorder"]):
    """A running recording of one rank. Close it, or leave its ``with`` block, to stop.

    Args:
        write: receives the number of an exchange and its figures.
        every: exchanges from one record to the next.
        read: returns figures of the run so far.
        watchers: call :meth:`landed`.
    """

    def __init__(
        self,
        write: Writer,
        every: int,
        read: Callable[[], Mapping[str, float]],
        watchers: list[Callable[[int, float], None]],
    ) -> None:
        self._write, self._every, self._read, self._watchers = write, every, read, watchers
        self._before = dict(read())
        self._closed = False

    def landed(self, number: int, apart: float) -> None:
        """Write an exchange that has landed. If the writer raises, the recording ends and training continues."""
        if (number - 1) % self._every:
            return
        now = dict(self._read())
        since = {name: value - self._before[name] for name, value in now.items()}
        self._before = now
        try:
            self._write(number, {**since, "inner_steps": now["inner_steps"], "apart": apart})
        except Exception:  # the writer is the user's
            log.exception("telemetry of an outer optimizer ends, because its writer raised")
            self.close()

    def close(self) -> None:
        """Stop, and close the writer."""
        if self._closed:
            return
        self._closed = True
        if self.landed in self._watchers:
            self._watchers.remove(self.landed)
        close = getattr(self._write, "close", None)
        if callable(close):
            close()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
