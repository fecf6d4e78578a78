"""Make peers notice a failure at once instead of after their group's time-out.

In a ring only the neighbours of a dead member see a broken connection. All others wait for the group's time-out. So a
member that notices a failure closes its own connections, and its neighbours notice next. Connections close only when
no reference to the group's works exists. torchft keeps the exception. Its traceback has frames that keep works, and so
sockets.
"""

import gc
import logging

from ch_ft.manager import Abortable, Reducer

log = logging.getLogger("commhooks")


class FailFast:
    """Passes a failure on to the peers.

    Args:
        manager: manager that stores the step's error.
        process_group: process group of the manager. Without it there is nothing to close.
    """

    def __init__(self, manager: Reducer, process_group: Abortable | None) -> None:
        self.manager = manager
        self.process_group = process_group

    def __call__(self, error: BaseException | None) -> None:
        """Handle a failure. The caller must have dropped all works of the attempt."""
        stored = self.manager.errored()
        log.warning("this step is lost and will be tried again: %s", summary(error or stored))
        for one in (error, stored, getattr(stored, "original_exception", None)):
            release(one)
        if self.process_group is not None:
            self.process_group.abort()
            gc.collect(1)  # cycles of this step; a full collection would cost more than all the rest


def release(error: object) -> None:
    """Drop the tracebacks of an exception and of its causes."""
    while isinstance(error, BaseException):
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


def summary(error: object) -> str:
    """Return an error in one line."""
    error = getattr(error, "original_exception", error)
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"
