"""Futures for buckets, as DDP or a user's hook receives them."""

import threading
from collections.abc import Callable
from typing import Any

import torch

from commhooks import NO_BACKWARD, HookNotSupportedError, backward_id


def behind_backward() -> bool:
    """Return True if DDP calls the hook after the last node of the graph has run.

    DDP does so in the first iteration of a static graph. Every bucket then has index 0, none is marked as the last, and
    DDP waits for each future at once.
    """
    return backward_id() != NO_BACKWARD and torch._C._current_autograd_node() is None


def future_for(tensor: torch.Tensor) -> "torch.futures.Future[torch.Tensor]":
    """Return a future. On CUDA its consumer's stream waits for the stream that completes it."""
    return torch.futures.Future(devices=[tensor.device]) if tensor.is_cuda else torch.futures.Future()


class HookFuture(torch.futures.Future[Any]):
    """Future of a bucket inside a user's hook, or a future derived from one with ``then``.

    The step's last bucket completes it, unless the bucket has its own message. The thread that delivers the buckets must
    therefore not wait for it. ``torch.futures.wait_all`` and ``collect_all`` wait inside torch and would hang.
    """

    _hook, _thread = "", 0
    _devices: tuple[torch.device, ...] = ()

    @classmethod
    def of(cls, buffer: torch.Tensor, hook: str) -> "HookFuture":
        """Make the future of a bucket that the current thread delivers to the named hook."""
        future = cls(devices=[buffer.device]) if buffer.is_cuda else cls()
        future._hook, future._thread, future._devices = hook, threading.get_ident(), (buffer.device,) * buffer.is_cuda
        return future

    def allow_waiting(self) -> None:
        """Allow waiting: the bucket's own message completes this future."""
        self._thread = 0

    def wait(self) -> Any:
        """Return the bucket's average, or the value derived from it.

        Raises:
            HookNotSupportedError: the waiting thread is the one that delivers the last bucket, so it would wait for ever.
        """
        if not self.done() and threading.get_ident() == self._thread:
            raise HookNotSupportedError(
                f"your hook waits for a future of {self._hook}, which completes all buckets of a step with the last one. "
                "The backward would hang. Return the future or future.then(...) instead of waiting, or use one bucket "
                "(a large bucket_cap_mb)"
            )
        return super().wait()

    def then(self, callback: Callable[[Any], Any]) -> torch.futures.Future[Any]:
        """Return the future of ``callback(self)``, as torch's ``then``, with the same rule for waiting."""
        if self._thread == 0:
            return super().then(callback)
        # torch's own then() gives a plain future, whose wait() could not refuse.
        after = HookFuture(devices=list(self._devices))
        after._hook, after._thread, after._devices = self._hook, self._thread, self._devices

        def complete(done: torch.futures.Future[Any]) -> None:
            try:
                result = callback(done)
            except Exception as error:
                after.set_exception(error)
            else:
                after.set_result(result)

        self.add_done_callback(complete)
        return after


class Promise:
    """Completes a future that users may wait for, once.

    Two callers may complete it: the thread that decodes the bucket's message, and the end of the step if the message is lost.
    """

    def __init__(self, future: HookFuture, buffer: torch.Tensor) -> None:
        self.future, self.buffer = future, buffer
        future.allow_waiting()
        self._completed, self._lock = False, threading.Lock()

    def complete(self) -> None:
        """Complete the future, at the first call only."""
        with self._lock:
            first, self._completed = not self._completed, True
        if first:
            self.future.set_result(self.buffer)
