"""When DDP calls a hook, and the futures that it, or a user's hook, is given for a bucket."""

import threading

import torch

from commhooks import HookNotSupportedError
from commhooks.adapters import NO_BACKWARD, backward_id


def behind_backward() -> bool:
    """Whether DDP calls the hook behind a backward, with no node of the graph at work.

    In the first iteration of a static graph it does so: every bucket has index 0, none is the last, and DDP waits for all
    their futures right after, before anything else can run.
    """
    return backward_id() != NO_BACKWARD and torch._C._current_autograd_node() is None


def future_for(tensor: torch.Tensor) -> "torch.futures.Future[torch.Tensor]":
    """A future that, on CUDA, makes its consumer's stream wait for the stream that completes it."""
    return torch.futures.Future(devices=[tensor.device]) if tensor.is_cuda else torch.futures.Future()


class LateFuture(torch.futures.Future[torch.Tensor]):
    """A bucket's future that the step's last bucket completes: who brings the buckets must not wait for it."""

    _hook, _thread = "", 0

    @classmethod
    def of(cls, buffer: torch.Tensor, hook: str) -> "LateFuture":
        """For this bucket of the hook of this name, brought by the present thread."""
        future = cls(devices=[buffer.device]) if buffer.is_cuda else cls()
        future._hook, future._thread = hook, threading.get_ident()
        return future

    def wait(self) -> torch.Tensor:
        """The bucket's average.

        Raises:
            HookNotSupportedError: it would never come, because the thread that brings the last bucket waits for it.
        """
        if not self.done() and threading.get_ident() == self._thread:
            raise HookNotSupportedError(
                f"{self._hook} ends all buckets of a step together, when the last one comes, and was waited for before: "
                "the backward would stand still for ever. Return its future, or a future.then(...), from your hook "
                "instead of waiting; or put the whole model into one bucket with a large bucket_cap_mb"
            )
        return super().wait()


class Promise:
    """A bucket's future, completed by its message or by who gives that up: whichever comes first."""

    def __init__(self, future: "torch.futures.Future[torch.Tensor]", buffer: torch.Tensor) -> None:
        self.future, self.buffer = future, buffer
        self._kept, self._lock = False, threading.Lock()

    def keep(self) -> None:
        with self._lock:
            first, self._kept = not self._kept, True
        if first:
            self.future.set_result(self.buffer)
