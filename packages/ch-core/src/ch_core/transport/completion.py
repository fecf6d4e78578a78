"""Calls on the threads that receive messages. The interpreter ends after them."""

import atexit
import time
import weakref
from collections.abc import Callable
from typing import Any

_LONGEST = 5.0  # seconds that the end of the process waits for a call


class _Call:
    __slots__ = ("__weakref__", "function", "future")

    def __init__(self, future: Any, function: Callable[[Any], None]) -> None:
        self.future, self.function = future, function

    def __call__(self, future: Any) -> None:
        self.function(future)


_alive: weakref.WeakSet[_Call] = weakref.WeakSet()


def call_on_arrival(future: Any, function: Callable[[Any], None]) -> None:
    """Call ``function(future)`` on the thread that completes the future, and let the end of the process wait for that.

    The thread takes the interpreter's lock for the call, and once more to release the function. If the interpreter ends
    meanwhile, the process hangs or aborts ("terminate called without an active exception"). A short script on a busy machine
    ends so soon after its last message.

    Args:
        future: of a message, as ``Work.get_future`` returns it.
        function: takes the completed future.
    """
    call = _Call(future, function)
    _alive.add(call)
    future.add_done_callback(call)


def is_lost(future: Any) -> bool:
    """True if the message of a completed future failed. ``Work.wait`` raises the reason."""
    try:
        future.value()
    except Exception:
        return True
    return False


@atexit.register
def _wait_for_calls() -> None:
    """Wait until the threads have released the functions of all completed futures."""
    ends = time.monotonic() + _LONGEST
    while any(call.future.done() for call in list(_alive)) and time.monotonic() < ends:
        time.sleep(0.001)
