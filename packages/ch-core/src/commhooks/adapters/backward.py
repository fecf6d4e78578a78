"""Which backward runs, and what is to be done at its end.

A wrapper that reduces in hooks of autograd must not be interrupted half way: DDP's reducer never recovers from an
exception. So an adapter raises when the wrapper has finished.
"""

from collections.abc import Callable

import torch

NO_BACKWARD = -1
"""What :func:`backward_id` gives where none runs."""


def backward_id() -> int:
    """The number of the backward that this thread runs, :data:`NO_BACKWARD` if none. One inside of another, as a reentrant
    checkpoint runs it, has a number of its own.
    """
    return torch._C._current_graph_task_id()


def at_end_of_backward(action: Callable[[], None]) -> None:
    """Run ``action`` at the end of the running backward, before DDP waits for its hooks' futures.

    Not at the end of one that a reentrant checkpoint runs inside of another: the other goes on.
    """

    def end() -> None:
        if torch._C._current_autograd_node() is None:
            action()

    _queue(end)


def after_backward(action: Callable[[], None]) -> None:
    """Run ``action`` when DDP has finished the running backward; at once if none is running.

    DDP finishes in a callback of its own, queued at the last bucket; a callback that queues the action runs after it.
    Raising from the hook, or from a callback queued directly, leaves the reducer unusable for ever.
    """
    if backward_id() == NO_BACKWARD:
        action()
        return
    _queue(lambda: _queue(action))


def raise_after_backward(error: BaseException, first: Callable[[], None] | None = None) -> None:
    """Raise from ``backward()`` once DDP has finished, and ``first`` has been called."""

    def raiser() -> None:
        if first is not None:
            first()
        raise error

    after_backward(raiser)


def _queue(callback: Callable[[], None]) -> None:
    queue: Callable[[Callable[[], None]], None] = torch.autograd.Variable._execution_engine.queue_callback
    queue(callback)
