"""The logger of this project, and text for standard error. Neither ever raises.

A training script may close standard error, send it to a pipe without a reader, or write it to a full disk. Python's
logging then raises from inside the handler. Text that stays in the stream's buffer makes the interpreter exit with
status 120. Both would turn a script that trained well into a failed one.
"""

import logging
import os
import re
import sys
import textwrap
from contextlib import suppress
from typing import Any, TextIO


class _SafeCallHandlers:
    """Replaces `Logger.callHandlers` of one logger; errors of handlers are dropped with their record."""

    def __init__(self, logger: logging.Logger) -> None:
        self._call = logger.callHandlers

    def __call__(self, record: logging.LogRecord) -> None:
        stream = sys.stderr
        flushed = _flushes(stream)
        with suppress(Exception):  # `Handler.handleError` raises if standard error is closed
            self._call(record)
        if flushed and not _flushes(stream):
            _drop_buffered(stream)


log = logging.getLogger("commhooks")
"""Logger of all packages of this project."""

# The user configures handlers on this logger or on the root, so the guard has to stand around all of them.
_guard: Any = _SafeCallHandlers(log)
log.callHandlers = _guard  # type: ignore[method-assign]


_CONTROL = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*|[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def plain(text: str) -> str:
    r"""Return text without escape sequences and control characters, which texts of other packages may have.

    >>> plain("\x1b[31mred\x1b[0m\a text"), plain("two\nlines")
    ('red text', 'two\nlines')
    """
    return _CONTROL.sub("", text)


def wrapped(text: str, columns: int = 80) -> str:
    """Return an error message as :func:`plain` lines of at most 80 columns. Lines that the message has broken itself stay.

    A message with marks (`^^^`) under a part of an expression stays as it is.

    >>> print(wrapped("HookConfigError: powersgd has no option 'rnk'", 30))
    HookConfigError: powersgd has
      no option 'rnk'
    """
    text = plain(text)
    lines = text.splitlines()
    if any(set(line.strip()) == {"^"} for line in lines):
        return text
    indents = [" " * (len(line) - len(line.lstrip()) + 2) for line in lines]
    return "\n".join(
        textwrap.fill(line, columns, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
        for line, indent in zip(lines, indents, strict=True)
    )


def wrapped_on_terminal(text: str) -> str:
    """Return :func:`wrapped` text if standard error is a terminal, else plain text, in which programs look for phrases."""
    with suppress(Exception):  # closed, or None
        if sys.stderr.isatty():
            return wrapped(text)
    return plain(text)


def write_stderr(text: str) -> bool:
    """Write text to standard error if that is possible.

    Returns:
        True if the text was written.
    """
    stream = sys.stderr
    if not _flushes(stream):  # closed, or full of text that the script wrote; the script's exit status stays
        return False
    try:
        stream.write(text)
        stream.flush()
    except Exception:
        _drop_buffered(stream)
        return False
    return True


def _flushes(stream: TextIO | None) -> bool:
    """True if the stream is open and its buffer is empty afterwards."""
    try:
        stream.flush()  # type: ignore[union-attr]
    except Exception:
        return False
    return True


def _drop_buffered(stream: TextIO) -> None:
    """Empty a buffer that cannot be written, by pointing its descriptor to the null device for one flush."""
    try:
        number = stream.fileno()
        kept, null = os.dup(number), os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(null, number)
            stream.flush()
        finally:
            os.dup2(kept, number)
            os.close(kept)
            os.close(null)
    except Exception:
        pass
