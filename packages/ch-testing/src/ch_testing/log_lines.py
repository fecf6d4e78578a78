"""Keeps what commhooks logs in a process of a test, where pytest's ``caplog`` does not reach."""

import logging

from ch_core import log


class LogLines(logging.Handler):
    """Keeps the messages that commhooks logs in this process from now on.

    Args:
        level: lowest level of a message.

    Attributes:
        lines: messages so far.

    Example:
        >>> kept = LogLines(logging.WARNING)
        >>> log.warning("%d ranks differ", 2)
        >>> kept.lines
        ['2 ranks differ']
        >>> log.removeHandler(kept)
    """

    def __init__(self, level: int = logging.NOTSET) -> None:
        super().__init__(level)
        self.lines: list[str] = []
        log.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
