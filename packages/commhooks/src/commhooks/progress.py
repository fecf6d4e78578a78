"""Lines on standard error while something runs. Imports no torch."""

import re
import shutil
import sys
import time
from contextlib import AbstractContextManager, suppress
from types import TracebackType

from ch_core import HookConfigError, plain, wrapped_on_terminal, write_stderr

LOG_SECONDS = 5.0  # between two lines of a log file, which keeps them all


def interval(every: int | str) -> tuple[int, float]:
    """Return the steps or the seconds from one line to the next; the other one is 0.

    Raises:
        HookConfigError: neither a number of steps nor seconds.

    >>> interval(100), interval("100"), interval("30s")
    ((100, 0.0), (100, 0.0), (0, 30.0))
    """
    found = re.fullmatch(r"([1-9]\d*)(s?)", str(every))
    if found is None:
        raise HookConfigError(f"{every!r} is no interval: give steps, as in 100, or seconds, as in 30s")
    return (0, float(found[1])) if found[2] else (int(found[1]), 0.0)


def write_line(text: str) -> None:
    """Write a line to standard error, above the bars that tqdm shows there."""
    text = wrapped_on_terminal(text)
    tqdm = getattr(sys.modules.get("tqdm"), "tqdm", None)
    if tqdm is not None:
        with suppress(Exception):  # another module of this name
            if len(tqdm._instances):
                tqdm.write(text, file=sys.stderr)
                return
    write_stderr(text + "\n")


class Progress(AbstractContextManager["Progress"]):
    r"""Says on standard error what a command does, so that a long one does not look dead.

    A terminal shows one line that changes and vanishes at the end. Elsewhere a line appears at most every few seconds.

    Args:
        command: its name.
        total: number of calls that will follow; 0 if it is unknown.

    Example:
        >>> import contextlib, io
        >>> with contextlib.redirect_stderr(io.StringIO()) as shown, Progress("doctor", 2) as tell:
        ...     tell.since -= 10  # as if it had begun ten seconds ago
        ...     tell("quant4")
        >>> shown.getvalue()
        'doctor: 1 of 2, quant4\n'
    """

    def __init__(self, command: str, total: int = 0) -> None:
        self._command, self._total, self._count = command, total, 0
        self.since = time.monotonic()

    def __call__(self, doing: str) -> None:
        """Say what begins or has ended now."""
        self._count += 1
        of = f"{self._count} of {self._total}, " if self._total else ""
        line = plain(f"{self._command}: {of}{doing}")  # names come from other packages
        if self._on_terminal():
            room = shutil.get_terminal_size().columns - 1  # a line that wraps would not vanish
            write_stderr(f"\r\x1b[K{line[:room]}")
        elif time.monotonic() - self.since >= LOG_SECONDS:
            self.since = time.monotonic()
            write_stderr(line + "\n")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._count and self._on_terminal():
            write_stderr("\r\x1b[K")

    def _on_terminal(self) -> bool:
        with suppress(Exception):  # closed, or None
            return sys.stderr.isatty()
        return False
