"""Hooks that are not ours: any ``(state, bucket) -> Future[Tensor]`` callable, called through the trampoline.

Its collectives are its own, so they cannot be counted, ordered or finished for it. What can be done: DDP gets futures
of our own, completed at the last bucket with results that have been checked, or with the local gradient when
something failed; then the error is raised from ``backward()``, on every rank. A rank that failed may have left out
collectives which others wait for. Nobody knows which, so after a failure the handle is dead on all ranks.
"""

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from commhooks.after import OUTSIDE, graph_task, raise_after_backward
from commhooks.bucket import Bucket, BucketLayout
from commhooks.control import Control
from commhooks.ddp import bucket_layout
from commhooks.errors import AttachError, HookResultError, HookTimeoutError, RemoteHookError
from commhooks.guard import checked, differing, digest, named
from commhooks.streams import future_for
from commhooks.typing import GradBucket

TensorFuture = torch.futures.Future[torch.Tensor]
_SHARE = 0.75  # of the deadline for the hook's futures; what is left is for telling the others
_POLL = 0.05  # seconds between looks for another rank's alarm
_ANEW = (
    "It left collectives unmatched, and nobody knows which: wrap the model anew (DistributedDataParallel over a new "
    "process group) and attach again"
)


@dataclass(slots=True)
class _Pending:
    index: int
    buffer: torch.Tensor
    ours: TensorFuture
    theirs: Any = None
    layout: BucketLayout | None = None


class ForeignDriver:
    """Calls a foreign hook and checks what it gives back.

    Args:
        hook: the callable: a function, a partial, an object; its second parameter may have any name.
        state: given to it as first argument.
        name: for errors.
        timeout: seconds after which every rank has an error, if a future is never completed or a peer is frozen.
    """

    def __init__(self, hook: Callable[[Any, Any], Any], state: object, name: str, timeout: float) -> None:
        self.hook, self.state, self.name, self.timeout = hook, state, name, timeout
        self.on_reduced: Callable[[Bucket], None] | None = None  # called with each bucket's result before DDP has it
        self.names: Mapping[int, str] = {}
        self.control: Control | None = None  # none where there is no other rank
        self.calls = self.steps = self.check_every = 0
        self.error: BaseException | None = None  # for good: the handle is dead
        self._refused = False  # the running step is not done at all
        self._pending: list[_Pending] = []
        self._warned: set[str] = set()

    def __call__(self, bucket: GradBucket) -> TensorFuture:
        self.calls += 1
        if bucket.index() == 0:
            self._pending.clear()  # of a backward that did not reach its end
            self._refused = self.error is not None
        buffer = bucket.buffer()
        one = _Pending(bucket.index(), buffer, future_for(buffer))
        if self.on_reduced is not None:
            one.layout = bucket_layout(bucket, self.names)
        self._pending.append(one)
        if self.error is None:
            try:
                one.theirs = self._future(self.hook(self.state, bucket), one.index)
            except BaseException as error:  # raised here it would leave DDP unusable
                self._fail(error, one.index)
        if bucket.is_last():
            self._finish()
        return one.ours

    def check(self) -> None:
        """Raise the error of the last failure with its own type."""
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        """Give up the control channel."""
        if self.control is not None:
            self.control.close()
            self.control = None

    # -- inside

    def _future(self, result: object, index: int) -> Any:
        if not isinstance(result, torch._C.Future):  # a raw collective's get_future() is of this class
            raise HookResultError(
                f"{self.name} returned {type(result).__name__} for bucket {index}; a DDP hook returns a "
                "torch.futures.Future that holds the reduced buffer"
            )
        return result

    def _finish(self) -> None:
        """Wait for the hook's futures, agree with the other ranks, and complete DDP's."""
        if self._refused:
            self._complete([one.buffer for one in self._pending])
            raise_after_backward(self._refusal())
            return
        values: list[torch.Tensor] = []
        begun = time.monotonic()
        for one in self._pending:
            if self.error is not None or one.theirs is None:
                break
            try:
                value = self._await(one.theirs, one.index, begun + _SHARE * self.timeout)
                values.append(checked(value, one.buffer, self.name, one.index, self._warned))
            except BaseException as error:
                self._fail(error, one.index)
        wrong = self._agree(values)
        if self.error is None and wrong is None:
            wrong = self._tell(values)
        good = self.error is None
        self._complete(values if good else [one.buffer for one in self._pending])
        self.steps += 1
        if self.error is not None:
            raise_after_backward(self.error)
        elif wrong is not None:
            raise_after_backward(wrong)

    def _tell(self, values: list[torch.Tensor]) -> BaseException | None:
        """Show the results to who asked; outside of a backward (``DDP.join``) nobody uses them."""
        if self.on_reduced is None or graph_task() == OUTSIDE:
            return None
        for one, value in zip(self._pending, values, strict=True):
            if one.layout is not None:
                try:
                    self.on_reduced(Bucket(one.layout, value.view(-1), one.index))
                except BaseException as error:
                    return error
        return None

    def _complete(self, values: list[torch.Tensor]) -> None:
        for one, value in zip(self._pending, values, strict=True):
            one.ours.set_result(value)
        self._pending.clear()

    def _await(self, future: Any, index: int, deadline: float) -> object:
        done = threading.Event()
        if not future.done():
            future.add_done_callback(lambda _: done.set())
            while not done.wait(max(0.0, min(_POLL, deadline - time.monotonic()))):
                heard = self.control.alarmed() if self.control is not None else None
                if heard is not None:
                    raise RemoteHookError(f"{self.name} failed on another rank: {heard}. {_ANEW}")
                if time.monotonic() >= deadline:
                    raise HookTimeoutError(
                        f"{self.name}: the future of bucket {index} was not completed "
                        f"within {_SHARE * self.timeout:g} s. "
                        f"Either the hook never completes it, or a peer is frozen. {_ANEW}"
                    )
        return future.wait()

    def _agree(self, values: list[torch.Tensor]) -> BaseException | None:
        """Hear of other ranks' failures, make ours known, and compare the results when that is due."""
        if self.control is None:
            return None
        due = self.error is None and self.check_every > 0 and (self.steps + 1) % self.check_every == 0
        mine = digest(values) if due else torch.zeros(2, dtype=torch.int64)
        text = "" if self.error is None else f"{type(self.error).__name__}: {self.error}"
        try:
            texts, digests = self.control.exchange(text, mine)
        except Exception as error:
            if self.error is None:
                self.error = error
            return None
        if self.error is None and texts:
            said = "; ".join(f"rank {rank}: {line}" for rank, line in texts.items())
            self.error = RemoteHookError(
                f"{self.name} failed on another rank, so this step's gradients are not valid on any rank. {said}. "
                f"{_ANEW}"
            )
        return differing(self.name, digests) if due and not texts else None

    def _fail(self, error: BaseException, index: int) -> None:
        self.error = named(error, self.name, index, "" if _ANEW in str(error) else _ANEW)
        if self.control is not None:
            self.control.alarm(f"bucket {index}: {type(error).__name__}: {error}")

    def _refusal(self) -> BaseException:
        earlier = f"{type(self.error).__name__}: {self.error}"
        error = AttachError(f"{self.name} failed in an earlier step: {earlier}. {_ANEW}")
        error.__cause__ = self.error
        return error
