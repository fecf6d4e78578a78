"""Identifies the running backward and runs code at its end.

An adapter must not raise while the wrapper reduces in hooks of autograd, because DDP's reducer never recovers from an
exception. It raises after the wrapper has finished.
"""

from collections.abc import Callable

import torch

NO_BACKWARD = -1
"""Returned by :func:`backward_id` if no backward runs."""


def backward_id() -> int:
    """Return the number of the backward that this thread runs, :data:`NO_BACKWARD` if none runs.

    A nested backward, such as one of a reentrant checkpoint, has another number.
    """
    return torch._C._current_graph_task_id()


def at_end_of_backward(action: Callable[[], None], *, nested: Callable[[], bool] | None = None) -> None:
    """Run ``action`` at the end of the running backward, before DDP waits for the futures of its hooks.

    It does not run at the end of a nested backward, because the outer one continues.

    Args:
        action: the action.
        nested: asked at the end of a nested backward. True runs the action there.
    """

    def end() -> None:
        if torch._C._current_autograd_node() is None or (nested is not None and nested()):
            action()

    _queue(end)


class _Interruption:
    """Callback of a backward. Calls an action if torch drops it, as it does if an exception ends the backward."""

    __slots__ = ("action",)

    def __init__(self, action: Callable[[], None]) -> None:
        self.action: Callable[[], None] | None = action

    def __call__(self) -> None:
        self.action = None

    def __del__(self) -> None:
        if self.action is not None:
            self.action()


def if_interrupted(action: Callable[[], None]) -> None:
    """Run ``action`` if an exception ends the running backward, before ``backward()`` raises the exception.

    >>> x = torch.ones(1, requires_grad=True)
    >>> def arrive(gradient):
    ...     if_interrupted(lambda: print("interrupted"))
    ...     raise ArithmeticError("in a backward")
    >>> handle = x.register_hook(arrive)
    >>> (x * 2).backward()
    Traceback (most recent call last):
    ArithmeticError: in a backward
    """
    _queue(_Interruption(action))


def after_backward(action: Callable[[], None]) -> None:
    """Run ``action`` after DDP has finished the running backward; at once if no backward runs.

    DDP finishes in a callback that it queues at the last bucket. A callback that queues the action runs after it. If the
    hook, or a callback that is queued directly, raises, the reducer stays unusable.
    """
    if backward_id() == NO_BACKWARD:
        action()
        return
    _queue(lambda: _queue(action))


def raise_after_backward(error: BaseException, first: Callable[[], None] | None = None) -> None:
    """Raise an error from ``backward()`` after DDP has finished.

    Args:
        error: the error.
        first: called before it is raised.
    """

    def raiser() -> None:
        if first is not None:
            first()
        raise error

    after_backward(raiser)


def _queue(callback: Callable[[], None]) -> None:
    queue: Callable[[Callable[[], None]], None] = torch.autograd.Variable._execution_engine.queue_callback
    queue(callback)
