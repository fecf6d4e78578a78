"""What may happen after DDP has finished a backward: raising, so that the model stays usable."""

from collections.abc import Callable

import torch

OUTSIDE = -1  # torch's number for "no backward is running"


def graph_task() -> int:
    """The number of the running backward, :data:`OUTSIDE` if none is."""
    return torch._C._current_graph_task_id()


def after_backward(action: Callable[[], None]) -> None:
    """Run ``action`` when DDP has finished the running backward; at once if none is running.

    DDP finishes in a callback of its own, queued at the last bucket; a callback that queues the action runs after it.
    Raising from the hook, or from a callback queued directly, leaves the reducer unusable for ever.
    """
    if graph_task() == OUTSIDE:
        action()
        return
    queue: Callable[[Callable[[], None]], None] = torch.autograd.Variable._execution_engine.queue_callback
    queue(lambda: queue(action))


def raise_after_backward(error: BaseException) -> None:
    """Raise from ``backward()`` once DDP has finished."""

    def raiser() -> None:
        raise error

    after_backward(raiser)
