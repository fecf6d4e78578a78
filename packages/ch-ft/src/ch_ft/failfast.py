"""Fail fast: when one member notices a failure, the others do not wait for the group's time-out.

In a ring only the neighbours of a dead member see their connection break; all others wait, for up to the group
time-out, for numbers that will not come. A member that noticed therefore closes its own connections, so that its
neighbours notice next. Closing needs every reference to the group's work gone: torchft keeps the exception, the
exception its traceback, and the traceback's frames the work with its sockets.
"""

import gc
import logging

from ch_ft.protocols import Abortable, Reducer

log = logging.getLogger("commhooks")


class FailFast:
    """Passes a failure on to the other members.

    Args:
        manager: keeps the step's error.
        process_group: the group given to the manager; without it, there is nothing that may be closed.
        enabled: ``False`` leaves the others to their time-out.

    Attributes:
        failures: attempts that failed here.
    """

    def __init__(self, manager: Reducer, process_group: Abortable | None, enabled: bool = True) -> None:
        self.manager = manager
        self.process_group = process_group
        self.enabled = enabled
        self.failures = 0

    def __call__(self, error: BaseException | None) -> None:
        """Take note of a failure. Everything that holds work of this attempt must have been dropped before."""
        self.failures += 1
        stored = self.manager.errored()
        log.warning("this step is lost and will be tried again: %s", summary(error or stored))
        for one in (error, stored, getattr(stored, "original_exception", None)):
            release(one)
        if self.process_group is not None and self.enabled:
            self.process_group.abort()
            gc.collect(1)  # cycles of this step's objects; a full collection would cost more than the rest of this


def release(error: object) -> None:
    """Drop the tracebacks of an exception and of all that led to it."""
    while isinstance(error, BaseException):
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


def summary(error: object) -> str:
    """An error in one line."""
    error = getattr(error, "original_exception", error)
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"
