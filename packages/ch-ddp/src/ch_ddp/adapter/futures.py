"""When DDP calls a hook, and the futures that it, or a user's hook, is given for a bucket."""

import threading
from collections.abc import Callable
from typing import Any

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


class HookFuture(torch.futures.Future[Any]):
    """A bucket's future as a user's hook gets it, or what follows from one.

    Until something of its own completes it, that is the step's last bucket: who brings the buckets must not wait for it.
    ``torch.futures.wait_all`` and ``collect_all`` wait inside torch, where nobody can tell: they hang.
    """

    _hook, _thread = "", 0
    _devices: tuple[torch.device, ...] = ()

    @classmethod
    def of(cls, buffer: torch.Tensor, hook: str) -> "HookFuture":
        """For this bucket of the hook of this name, brought by the present thread."""
        future = cls(devices=[buffer.device]) if buffer.is_cuda else cls()
        future._hook, future._thread, future._devices = hook, threading.get_ident(), (buffer.device,) * buffer.is_cuda
        return future

    def comes_alone(self) -> None:
        """Something of its own completes it."""
        self._thread = 0

    def wait(self) -> Any:
        """The bucket's average, or what was made of it.

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

    def then(self, callback: Callable[[Any], Any]) -> torch.futures.Future[Any]:
        """What ``callback`` makes of it. As torch's, but not to be waited for either where this one is not."""
        if self._thread == 0:
            return super().then(callback)
        # torch's own would be a plain future, whose wait() nobody can refuse.
        after = HookFuture(devices=list(self._devices))
        after._hook, after._thread, after._devices = self._hook, self._thread, self._devices

        def follow(done: torch.futures.Future[Any]) -> None:
            try:
                result = callback(done)
            except Exception as error:
                after.set_exception(error)
            else:
                after.set_result(result)

        self.add_done_callback(follow)
        return after


class Promise:
    """A bucket's future, completed by its message or by who gives that up: whichever comes first. It may be waited for."""

    def __init__(self, future: HookFuture, buffer: torch.Tensor) -> None:
        self.future, self.buffer = future, buffer
        future.comes_alone()
        self._kept, self._lock = False, threading.Lock()

    def keep(self) -> None:
        with self._lock:
            first, self._kept = not self._kept, True
        if first:
            self.future.set_result(self.buffer)
