"""Results that are put in place by the thread that brings them, so that a hook's future need not wait for anybody."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

Decode = Callable[[], None] | None


Message = tuple[Any, torch.Tensor, Decode]
"""A collective under way, where its result goes, and what decodes it."""


def on_arrival(works: Sequence[Message], action: Callable[[], None]) -> list[Message]:
    """Have ``action`` called as soon as all results are decoded, or lost.

    Args:
        works: collectives under way over a process group.
        action: called once, on the thread that brings the last result.

    Returns:
        The same works; what is called after each waits until it has been decoded, and raises what that raised.
    """
    if not works:  # an empty bucket
        action()
    told = _Countdown(len(works), action)
    found: list[Message] = []
    for work, output, decode in works:
        arrival = _Arrival(decode, told)
        found.append((work, output, arrival.wait))
        work.future().add_done_callback(arrival)
    return found


class _Countdown:
    """Calls ``action`` when it has been called ``left`` times, on whatever threads."""

    def __init__(self, left: int, action: Callable[[], None]) -> None:
        self._left, self._action, self._lock = left, action, threading.Lock()

    def __call__(self) -> None:
        with self._lock:
            self._left -= 1
            last = self._left == 0
        if last:
            self._action()


class _Arrival:
    """Decodes one result; another thread may wait until that is done."""

    def __init__(self, decode: Decode, told: Callable[[], None]) -> None:
        self._decode, self._told, self._done = decode, told, threading.Event()
        self._error: BaseException | None = None

    def __call__(self, future: Any) -> None:
        try:
            future.value()
        except RuntimeError:  # lost: whoever waits for the work is told why
            self._decode = None
        try:
            if self._decode is not None:
                with torch.no_grad():  # another thread than the hook's, where gradients would be recorded
                    self._decode()
        except BaseException as error:
            self._error = error
        self._done.set()
        self._told()

    def wait(self) -> None:
        self._done.wait()
        if self._error is not None:
            raise self._error
