"""Foreign hooks: any ``(state, bucket) -> Future[Tensor]`` callable that is not a reduction.

A foreign hook starts its own collectives, so commhooks cannot count, order or complete them. DDP gets other futures
instead. At the last bucket they complete with checked results, or with the local gradient after a failure. Then every
rank raises the error from ``backward()``. A failed rank may have skipped collectives that its peers wait for. The rank
does not know these, so after a failure the handle refuses all further steps on all ranks.

Ranks report failures over a separate control channel. On the hook's group, the report would match a collective that the
failed rank skipped, which aborts the process on gloo. A failing rank sets a key in the group's store, which releases
waiting peers. At the end of every step all ranks exchange one message of fixed size.
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

from ch_core import TUNED, ProcessGroupTransport, ProcessGroupWork, RankCheck, StoreExchange, call_on_arrival
from ch_ddp.adapter.finalization import Finalizer, raise_finalized
from ch_ddp.adapter.futures import behind_backward, future_for
from ch_ddp.adapter.layout import bucket_layout
from ch_ddp.adapter.result_checks import annotate, checked, gradient_checksum, mismatch, refuse_annotations
from ch_ddp.adapter.step_limits import StepLimits
from commhooks import (
    NO_BACKWARD,
    AttachError,
    Bucket,
    BucketLayout,
    GradBucket,
    HookResultError,
    HookTimeoutError,
    RemoteHookError,
    TransportError,
    backward_id,
)

TensorFuture = torch.futures.Future[torch.Tensor]
_SHARE = 0.75  # share of the deadline for the hook's futures; the rest is for the exchange between ranks
_POLL = 0.05  # seconds between two checks for another rank's alarm
_REWRAP = (
    "Its collectives no longer match between ranks. Wrap the model again (DistributedDataParallel over a new process "
    "group) and attach again"
)


@dataclass(slots=True)
class _Pending:
    index: int
    buffer: torch.Tensor
    ours: TensorFuture
    theirs: Any = None
    value: torch.Tensor | None = None  # the hook's checked result
    layout: BucketLayout | None = None


class ForeignDriver:
    """Calls a foreign hook and checks its results.

    Args:
        hook: function, partial or callable object. Its second parameter may have any name.
        state: first argument of the hook.
        name: hook's name, for errors.
        timeout: seconds until every rank raises an error if a future never completes or a peer hangs.
        group: process group of the hook. It is given up if ranks started different collectives.
        skips_after: see :class:`.StepLimits`; None if DDP skips no bucket.

    Attributes:
        on_begin, on_end: see :class:`~ch_ddp.DDPDriver`.
    """

    def __init__(
        self,
        hook: Callable[[Any, Any], Any],
        state: object,
        name: str,
        timeout: float,
        group: dist.ProcessGroup,
        *,
        skips_after: Callable[[int], bool] | None = None,
    ) -> None:
        refuse_annotations(hook, name)
        self.hook, self.state, self.name, self.timeout, self.group = hook, state, name, timeout, group
        self.on_reduced: Callable[[Bucket], None] | None = None  # called with each bucket's result before DDP reads it
        self.names: Mapping[int, str] = {}
        self.control: Control | None = None  # None in a group of one rank
        self.finalizer: Finalizer | None = None
        self.on_begin: Callable[[ForeignDriver], None] | None = None
        self.on_end: Callable[[], None] | None = None
        self.limits = StepLimits(may_miss_last=skips_after is not None, skips_after=skips_after)
        self.calls = self.steps = self.check_every = 0
        self.rank_check: RankCheck | None = None
        self.error: BaseException | None = None  # permanent: the handle refuses all further steps
        self._unmatched = False  # True if ranks may have started different collectives
        self._refused = False  # True if the current step is refused
        self._pending: list[_Pending] = []
        self._warned: set[str] = set()

    def __call__(self, bucket: GradBucket) -> TensorFuture:
        self.calls += 1
        if self.limits.enter(bucket, self._finish):
            self._pending.clear()  # an earlier backward did not reach its end
            self._refused = self.error is not None
            if self.on_begin is not None:
                self.on_begin(self)
        buffer = bucket.buffer()
        one = _Pending(bucket.index(), buffer, future_for(buffer))
        if self.on_reduced is not None:
            one.layout = bucket_layout(bucket, self.names)
        self._pending.append(one)
        if self.error is None:
            try:
                one.theirs = self._future(self.hook(self.state, bucket), one.index)
            except BaseException as error:  # an exception here would leave DDP unusable
                self._fail(error, one.index)
        if behind_backward():  # DDP waits for this future before its next call
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
        """Close the control channel."""
        if self.control is not None:
            self.control.close()
            self.control = None

    def open_control(self) -> None:
        """Open the control channel over :attr:`group`. All ranks of the group must call it."""
        if dist.get_world_size(self.group) > 1:
            self.control = Control(self.group, self.timeout)

    def uses_group(self, group: dist.ProcessGroup) -> bool:
        """Return True if the hook reduces over this process group."""
        return self.group is group

    def move(self, group: dist.ProcessGroup) -> None:
        """Use another group of ranks. All ranks of the group must call it."""
        self.close()
        self.group = group
        self.open_control()
        if self.rank_check is not None:
            self.rank_check.restart()

    # -- one step

    def _future(self, result: object, index: int) -> Any:
        if not isinstance(result, torch._C.Future):  # the class of a raw collective's get_future()
            raise HookResultError(
                f"{self.name} returned {type(result).__name__} for bucket {index}. A DDP hook must return a "
                "torch.futures.Future of the reduced buffer"
            )
        return result

    def _finish(self) -> None:
        """Wait for the hook's futures, agree with all ranks on the outcome, and complete DDP's futures."""
        if not self.limits.leave():
            return  # the last bucket has ended the step
        if self.on_end is not None:
            self.on_end()
        if self.finalizer is not None:
            self.finalizer.last_bucket_arrived()
        if self._refused:
            self._complete(good=False)
            raise_finalized(self._refusal())
            return
        self._await_all([one for one in self._pending if one.value is None])
        check = self._due_check()
        wrong = self._agree()
        if check is not None and self.error is None:
            wrong = self._compare_params(check) or wrong
        if self.error is None and wrong is None:
            wrong = self._tell()
        self._complete(good=self.error is None)
        self.steps += 1
        if self.error is not None:
            if self._unmatched:
                ProcessGroupTransport(self.group).abort()
            raise_finalized(self.error)
        elif wrong is not None:
            raise_finalized(wrong)

    def _await_all(self, buckets: list[_Pending]) -> None:
        """Wait for the results of some buckets, and check them."""
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
        """Call :attr:`on_reduced` with all results. Outside a backward (``DDP.join``) they are not used."""
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
            call_on_arrival(future, lambda _: done.set())
            while not done.wait(max(0.0, min(_POLL, deadline - time.monotonic()))):
                received = self.control.alarmed() if self.control is not None else None
                if received is not None:
                    raise RemoteHookError(f"{self.name} failed on another rank: {received}. {_REWRAP}")
                if time.monotonic() >= deadline:
                    raise HookTimeoutError(
                        f"{self.name}: the future of bucket {index} did not complete "
                        f"within {_SHARE * self.timeout:g} s. "
                        f"Either the hook never completes it, or a peer hangs. {_REWRAP}"
                    )
        return future.wait()

    def _agree(self) -> BaseException | None:
        """Exchange failures with all ranks, and compare results every :attr:`check_every` steps."""
        if self.control is None:
            return None
        due = self.error is None and self.check_every > 0 and (self.steps + 1) % self.check_every == 0
        mine = (
            gradient_checksum([one.value for one in self._pending if one.value is not None])
            if due
            else torch.zeros(2, dtype=torch.int64, device="cpu")
        )
        text = "" if self.error is None else f"{type(self.error).__name__}: {self.error}"
        try:
            texts, checksums = self.control.exchange(text, mine)
        except Exception as error:
            self._unmatched = True
            if self.error is None:
                self.error = error
            return None
        # If all ranks failed, they failed at the same place, so collectives match. A timeout proves no place.
        self._unmatched = 0 < len(texts) < self.control.world_size or isinstance(self.error, HookTimeoutError)
        if self.error is None and texts:
            failures = "; ".join(f"rank {rank}: {line}" for rank, line in texts.items())
            self.error = RemoteHookError(
                f"{self.name} failed on another rank, so no rank has valid gradients in this step. {failures}. {_REWRAP}"
            )
        return mismatch(self.name, checksums) if due and not texts else None

    def _due_check(self) -> RankCheck | None:
        """Return the comparison of parameters if it is due. Its failure fails the step on all ranks."""
        if self.rank_check is None or self.control is None:
            return None
        apart = "the hook's state is in its phase of local SGD" if getattr(self.state, "local", False) is True else ""
        try:
            return self.rank_check if self.rank_check.prepare(apart=apart) else None
        except BaseException as error:
            self._fail(error, self._pending[-1].index if self._pending else 0)
            return None

    def _compare_params(self, check: RankCheck) -> BaseException | None:
        control = self.control
        assert control is not None  # noqa: S101 - `_due_check` has tested it
        try:
            check.compare(lambda row: control.exchange("", row)[1])
        except Exception as error:
            self._unmatched, self.error = True, error
        return check.take_error()

    def _fail(self, error: BaseException, index: int) -> None:
        self.error = annotate(error, self.name, index, "" if _REWRAP in str(error) else _REWRAP)
        if self.control is not None:
            self.control.alarm(f"bucket {index}: {type(error).__name__}: {error}")

    def _refusal(self) -> BaseException:
        earlier = f"{type(self.error).__name__}: {self.error}"
        error = AttachError(f"{self.name} failed in an earlier step: {earlier}. {_REWRAP}")
        error.__cause__ = self.error
        return error


TEXT_BYTES = 256


class Control:
    """Control channel of one attached foreign hook. Its construction is a collective of the group.

    The channel is no ``torch.distributed`` group. The name of such a group counts the groups that a rank has made, and
    that count may differ between ranks.

    Args:
        group: process group of the hook.
        timeout: seconds to wait for the slowest rank, here and at the end of a step.

    Raises:
        HookTimeoutError: a rank did not arrive in time.
        TransportError: ranks could not connect.
    """

    def __init__(self, group: dist.ProcessGroup, timeout: float) -> None:
        self.timeout, self.rank, self.world_size = timeout, dist.get_rank(group), dist.get_world_size(group)
        # A random number of rank 0 names the channel, so that no earlier channel has the same name.
        number = StoreExchange(group, timeout)(os.urandom(8))[0].hex()
        self._store = PrefixStore(f"commhooks/control/{number}", _get_process_group_store(group))
        try:
            private: Any = dist.ProcessGroupGloo(
                PrefixStore("gloo", self._store), self.rank, self.world_size, timedelta(seconds=timeout)
            )
            private.barrier().wait()  # a rank that closes its channel at once would break those that still connect
        except RuntimeError as error:
            raise TransportError(
                f"ranks could not open a control channel: {error}. Check that every host is reachable under its name, or "
                "set GLOO_SOCKET_IFNAME"
            ) from error
        self._private: list[Any] = [private]
        self.close = weakref.finalize(self, self._private.clear)  # at exit too: gloo must end before the interpreter

    def alarm(self, text: str) -> None:
        """Release waiting peers, because this rank will not finish the step."""
        try:
            self._store.set("alarm", f"rank {self.rank}: {text}"[:TEXT_BYTES])
        except RuntimeError:  # the store's host is gone; peers end by their deadline
            return

    def alarmed(self) -> str | None:
        """Return the alarm of another rank, or None."""
        try:
            return self._store.get("alarm").decode(errors="replace") if self._store.check(["alarm"]) else None
        except RuntimeError:
            return None

    def exchange(self, text: str, checksum: torch.Tensor) -> tuple[dict[int, str], torch.Tensor]:
        """Exchange errors and checksums of a step between all ranks.

        Args:
            text: this rank's error, or an empty string.
            checksum: ``(2,)`` int64, checksum of the reduced gradients, or zeros.

        Returns:
            The errors by rank, and all checksums, ``(world, 2)`` int64.

        Raises:
            HookTimeoutError, TransportError: a rank did not answer.
        """
        world = self.world_size
        head = torch.tensor(list(text.encode()[:TEXT_BYTES].ljust(TEXT_BYTES, b"\0")), dtype=torch.uint8, device="cpu")
        mine = torch.cat([checksum.cpu().view(torch.uint8), head])
        everyone = torch.empty(world * mine.numel(), dtype=torch.uint8, device="cpu")
        try:
            work = self._private[0].allgather(list(everyone.view(world, -1).unbind()), mine)
            exchange = ProcessGroupWork(work, "the exchange at the end of a step", everyone, mine)
            TUNED.wait(exchange, everyone, self.timeout)
        except HookTimeoutError as error:
            raise HookTimeoutError(f"a rank did not reach the end of the step: {error}") from error
        rows = everyone.view(world, -1)
        texts = {r: bytes(rows[r, 16:].tolist()).rstrip(b"\0").decode(errors="replace") for r in range(world)}
        return {r: t for r, t in texts.items() if t}, rows[:, :16].contiguous().view(torch.int64)
