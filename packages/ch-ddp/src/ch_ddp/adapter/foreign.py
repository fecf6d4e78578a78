"""Hooks that are not ours: any ``(state, bucket) -> Future[Tensor]`` callable, called through the trampoline.

Its collectives are its own, so they cannot be counted, ordered or finished for it. What can be done: DDP gets futures
of our own, completed at the last bucket with results that have been checked, or with the local gradient when
something failed; then the error is raised from ``backward()``, on every rank. A rank that failed may have left out
collectives which others wait for. Which they are is unknown, so after a failure the handle is dead on all ranks.
"""

import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_process_group_store

from ch_ddp.adapter.finalization import Finalizer, raise_finalized
from ch_ddp.adapter.futures import behind_backward, future_for
from ch_ddp.adapter.layout import bucket_layout
from ch_ddp.adapter.result_checks import annotate, checked, differing, digest, refuse_annotations
from commhooks import (
    AttachError,
    Bucket,
    BucketLayout,
    GradBucket,
    HookResultError,
    HookTimeoutError,
    RemoteHookError,
    TransportError,
)
from commhooks.adapters import NO_BACKWARD, TUNED, ProcessGroupWork, StoreExchange, at_end_of_backward, backward_id

TensorFuture = torch.futures.Future[torch.Tensor]
_SHARE = 0.75  # of the deadline for the hook's futures; what is left is for telling the others
_POLL = 0.05  # seconds between looks for another rank's alarm
_ANEW = (
    "It left collectives unmatched, which ones is unknown: wrap the model anew (DistributedDataParallel over a new "
    "process group) and attach again"
)


@dataclass(slots=True)
class _Pending:
    index: int
    buffer: torch.Tensor
    ours: TensorFuture
    theirs: Any = None
    value: torch.Tensor | None = None  # the hook's result, checked
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
        refuse_annotations(hook, name)
        self.hook, self.state, self.name, self.timeout = hook, state, name, timeout
        self.on_reduced: Callable[[Bucket], None] | None = None  # called with each bucket's result before DDP has it
        self.names: Mapping[int, str] = {}
        self.control: Control | None = None  # none where there is no other rank
        self.finalizer: Finalizer | None = None
        self.give_up: Callable[[], None] | None = None  # called when its collectives are left unmatched
        self.calls = self.steps = self.check_every = 0
        self.error: BaseException | None = None  # for good: the handle is dead
        self._unmatched = False  # ranks may have started different collectives
        self._refused = False  # the running step is not done at all
        self._pending: list[_Pending] = []
        self._warned: set[str] = set()
        self._task = NO_BACKWARD  # the backward that the pending buckets belong to

    def __call__(self, bucket: GradBucket) -> TensorFuture:
        self.calls += 1
        behind, task = behind_backward(), backward_id()
        if bucket.index() == 0 and not (behind and self._pending and task == self._task):
            self._pending.clear()  # of a backward that did not reach its end
            self._refused = self.error is not None
            if behind:
                at_end_of_backward(self._finish)  # no last bucket will come
        self._task = task
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
        if behind:  # DDP waits for this future before it calls anything else
            self._await_all([one])
            one.ours.set_result(one.buffer if one.value is None else one.value)
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
        if self.finalizer is not None:
            self.finalizer.ready()
        if self._refused:
            self._complete(good=False)
            raise_finalized(self._refusal())
            return
        self._await_all([one for one in self._pending if one.value is None])
        wrong = self._agree()
        if self.error is None and wrong is None:
            wrong = self._tell()
        self._complete(good=self.error is None)
        self.steps += 1
        if self.error is not None:
            if self._unmatched and self.give_up is not None:
                self.give_up()
            raise_finalized(self.error)
        elif wrong is not None:
            raise_finalized(wrong)

    def _await_all(self, buckets: list[_Pending]) -> None:
        """Have the results of some buckets, or an error."""
        begun = time.monotonic()
        for one in buckets:
            if self.error is not None or one.theirs is None:
                break
            try:
                value = self._await(one.theirs, one.index, begun + _SHARE * self.timeout)
                one.value = checked(value, one.buffer, self.name, one.index, self._warned)
            except BaseException as error:
                self._fail(error, one.index)

    def _tell(self) -> BaseException | None:
        """Show the results to who asked; outside of a backward (``DDP.join``) nobody uses them."""
        if self.on_reduced is None or backward_id() == NO_BACKWARD:
            return None
        for one in self._pending:
            if one.layout is not None and one.value is not None:
                try:
                    self.on_reduced(Bucket(one.layout, one.value.view(-1), one.index))
                except BaseException as error:
                    return error
        return None

    def _complete(self, *, good: bool) -> None:
        for one in self._pending:
            if not one.ours.done():
                one.ours.set_result(one.value if good and one.value is not None else one.buffer)
        self._pending.clear()

    def _await(self, future: Any, index: int, deadline: float) -> object:
        done = threading.Event()
        if not future.done():
            future.add_done_callback(lambda _: done.set())
            while not done.wait(max(0.0, min(_POLL, deadline - time.monotonic()))):
                received = self.control.alarmed() if self.control is not None else None
                if received is not None:
                    raise RemoteHookError(f"{self.name} failed on another rank: {received}. {_ANEW}")
                if time.monotonic() >= deadline:
                    raise HookTimeoutError(
                        f"{self.name}: the future of bucket {index} was not completed "
                        f"within {_SHARE * self.timeout:g} s. "
                        f"Either the hook never completes it, or a peer is frozen. {_ANEW}"
                    )
        return future.wait()

    def _agree(self) -> BaseException | None:
        """Receive other ranks' failures, send ours, and compare the results when that is due."""
        if self.control is None:
            return None
        due = self.error is None and self.check_every > 0 and (self.steps + 1) % self.check_every == 0
        mine = (
            digest([one.value for one in self._pending if one.value is not None])
            if due
            else torch.zeros(2, dtype=torch.int64, device="cpu")
        )
        text = "" if self.error is None else f"{type(self.error).__name__}: {self.error}"
        try:
            texts, digests = self.control.exchange(text, mine)
        except Exception as error:
            self._unmatched = True
            if self.error is None:
                self.error = error
            return None
        # Where all ranks failed, they failed at the same place; but a wait that ended is nobody's place.
        self._unmatched = 0 < len(texts) < self.control.world_size or isinstance(self.error, HookTimeoutError)
        if self.error is None and texts:
            said = "; ".join(f"rank {rank}: {line}" for rank, line in texts.items())
            self.error = RemoteHookError(
                f"{self.name} failed on another rank, so this step's gradients are not valid on any rank. {said}. "
                f"{_ANEW}"
            )
        return differing(self.name, digests) if due and not texts else None

    def _fail(self, error: BaseException, index: int) -> None:
        self.error = annotate(error, self.name, index, "" if _ANEW in str(error) else _ANEW)
        if self.control is not None:
            self.control.alarm(f"bucket {index}: {type(error).__name__}: {error}")

    def _refusal(self) -> BaseException:
        earlier = f"{type(self.error).__name__}: {self.error}"
        error = AttachError(f"{self.name} failed in an earlier step: {earlier}. {_ANEW}")
        error.__cause__ = self.error
        return error


TEXT_BYTES = 256


class Control:
    """The control channel of one attached foreign hook. Making it is a collective of the group.

    Its connections are not a group of ``torch.distributed``: the name of such a group, under which ranks find one another,
    follows from how many groups a rank has and had, and these numbers may differ.

    Args:
        group: the ranks.
        timeout: seconds to wait for the slowest rank, here and at the end of a step.

    Raises:
        HookTimeoutError: a rank did not come.
        TransportError: the ranks could not be connected.
    """

    def __init__(self, group: dist.ProcessGroup, timeout: float) -> None:
        self.timeout, self.rank, self.world_size = timeout, dist.get_rank(group), dist.get_world_size(group)
        # Rank 0's number names the channel: none before had it, whatever else each rank has made and destroyed.
        number = StoreExchange(group, timeout)(os.urandom(8))[0].hex()
        self._store = PrefixStore(f"commhooks/control/{number}", _get_process_group_store(group))
        try:
            private = dist.ProcessGroupGloo(
                PrefixStore("gloo", self._store), self.rank, self.world_size, timedelta(seconds=timeout)
            )
        except RuntimeError as error:
            raise TransportError(
                f"the ranks could not be connected for telling one another of failures: {error}. Is every rank's host "
                "reachable under its name (GLOO_SOCKET_IFNAME)?"
            ) from error
        self._private: list[Any] = [private]
        self.close = weakref.finalize(self, self._private.clear)  # also at exit: gloo is not to outlive the interpreter

    def alarm(self, text: str) -> None:
        """Release the peers: this rank will not finish the step."""
        try:
            self._store.set("alarm", f"rank {self.rank}: {text}"[:TEXT_BYTES])
        except RuntimeError:  # the store is gone with its host; peers have their deadline
            return

    def alarmed(self) -> str | None:
        """What another rank has put into :meth:`alarm`, if any has."""
        try:
            return self._store.get("alarm").decode(errors="replace") if self._store.check(["alarm"]) else None
        except RuntimeError:
            return None

    def exchange(self, text: str, digest: torch.Tensor) -> tuple[dict[int, str], torch.Tensor]:
        """Exchange what each rank has to say of the step.

        Args:
            text: what went wrong here; empty if nothing did.
            digest: ``(2,)`` int64, of the reduced gradients, or zeros.

        Returns:
            rank -> text of those that have one, and all digests, ``(W, 2)``.

        Raises:
            HookTimeoutError, TransportError: a rank did not answer.
        """
        world = self.world_size
        head = torch.tensor(list(text.encode()[:TEXT_BYTES].ljust(TEXT_BYTES, b"\0")), dtype=torch.uint8, device="cpu")
        mine = torch.cat([digest.cpu().view(torch.uint8), head])
        everyone = torch.empty(world * mine.numel(), dtype=torch.uint8, device="cpu")
        try:
            work = self._private[0].allgather(list(everyone.view(world, -1).unbind()), mine)
            exchange = ProcessGroupWork(work, "the exchange at the end of a step", everyone, mine)
            TUNED.wait(exchange, everyone, self.timeout)
        except HookTimeoutError as error:
            raise HookTimeoutError(f"a rank did not end the step: {error}") from error
        rows = everyone.view(world, -1)
        texts = {r: bytes(rows[r, 16:].tolist()).rstrip(b"\0").decode(errors="replace") for r in range(world)}
        return {r: t for r, t in texts.items() if t}, rows[:, :16].contiguous().view(torch.int64)
