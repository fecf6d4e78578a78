"""Outcome of a step: the status message, and the decision that all ranks share.

At the end of each step the ranks all-reduce one status vector of ``W + 1`` fp32 numbers::

    element r   = code of rank r + 4 * clock of rank r      (0 from every other rank)
    element W   = number of ranks that saw a reduced NaN or Inf, or NaN; between far ranks plus a mark of each rank

If the average is weighted, the weights of the ranks follow (:mod:`ch_core.engine.weights`), W numbers more.

The code of rank r says where its reduction raised, 0 if it did not. The clock of rank r is 1 + (n + d) modulo 2**18 - 1. The
count n is the number of steps that the rank has committed plus, with a judge, the number of steps that the judge saw used. The
digest d is that of the step's buckets. A rank that has run out of input sends 0 instead. Ranks with different clocks have
averaged different parameters, or would soon start different collectives. Messages of different buckets may have equal sizes, so
that no transport notices. Code and clock fit exactly into fp32, because 4 * 2**18 is below 2**24. All ranks see the same vector,
so all decide equally. Texts of errors are exchanged only after a failure, in messages of a fixed size.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from enum import IntEnum, auto
from functools import partial

import torch

from ch_core.bucket import Bucket
from ch_core.device import HostCopy, is_asynchronous
from ch_core.engine.messages import Batch
from ch_core.engine.weights import StepWeights
from ch_core.errors import CommHooksError, RankMismatchError, RemoteHookError
from ch_core.logs import log
from ch_core.requests import AllGather, AllReduce, Request
from ch_core.transport.base import Transport

ENCODE, BETWEEN, DECODE = 1, 2, 3
WHERE = {ENCODE: "before its first collective", BETWEEN: "between collectives", DECODE: "after its last collective"}
TEXT_BYTES = 512
_CODES, _CLOCKS = 4, 2**18 - 1
_MARK = 2**12  # with it a message of other numbers does not pass for a status

CarryOut = Callable[[Request], None]
"""Carries out one request over all ranks and returns when it is done."""


class Status:
    """The status message of one step: this rank's part, and all ranks' parts after :meth:`received`.

    Args:
        rank: this rank.
        world: number of ranks.
        code: place at which this rank's reduction raised, or 0.
        clock: number of committed and used steps of this rank; ``None`` if it contributes no data.
        sums: results of :func:`finiteness` for reduced tensors.
        device: device of the step's collectives.
        buckets: digest of the step's buckets.
        weights: this rank's part of the weights, (W,) fp32; ``None`` if the status carries none.
        marked: True if only their order tells which messages belong together. If a rank has dropped a step alone, another
            message of the same length may arrive in place of its status, even zeros. So each rank adds a mark to element W.
    """

    def __init__(
        self,
        rank: int,
        world: int,
        code: int,
        clock: int | None,
        sums: Sequence[torch.Tensor | float],
        device: torch.device,
        buckets: int = 0,
        weights: torch.Tensor | None = None,
        marked: bool = False,
    ) -> None:
        self.rank, self.world, self._buckets = rank, world, buckets
        self._marks, self._foreign = _MARK * world if marked else 0, False
        mine = code + _CODES * (0 if clock is None else 1 + (clock + buckets) % _CLOCKS)
        size = world + 1 if weights is None else 2 * world + 1
        self.vector = torch.zeros(size, dtype=torch.float32, device=device)
        if weights is not None:
            self.weights.copy_(weights)
        # An assignment by index copies from pageable memory, for which the host would wait for a GPU.
        self.vector[rank].fill_(mine)
        unread = [s.to(device) for s in sums if isinstance(s, torch.Tensor)]
        if unread:  # 0 * x is NaN for Inf and NaN, and 0 otherwise. Without it finite sums could add up to Inf
            torch.sum(torch.stack(unread).mul_(0.0), 0, dtype=torch.float32, out=self.vector[world])
        if not math.isfinite(sum(s for s in sums if isinstance(s, float))):
            self.vector[world].fill_(1)
        if marked:
            self.vector[world].add_(_MARK)
        self._copy: HostCopy | None = None
        self._values: list[float] | None = None
        self._failed: dict[int, int] = {}
        self._clocks: dict[int, int] = {}

    @property
    def weights(self) -> torch.Tensor:
        """The weights in the vector, (W,); empty if the status carries none."""
        return self.vector[self.world + 1 :]

    def message(self) -> AllReduce:
        """Return the request that gives all ranks the whole vector."""
        return AllReduce(self.vector, "sum")

    def received(self) -> None:
        """Copy the received vector to the host. On a GPU the host waits for it only when it reads the values."""
        self._copy = HostCopy(self.vector)

    def _read(self) -> list[float]:
        if self._values is None:
            self._values = (self._copy or HostCopy(self.vector)).values()
            bad = self._values[self.world] - self._marks
            if self._marks and bad not in range(self.world + 1):
                self._foreign = True
                return self._values
            parts = list(enumerate(int(value) for value in self._values[: self.world]))
            self._failed = {rank: value % _CODES for rank, value in parts if value % _CODES}
            clocks = {rank: value // _CODES - 1 for rank, value in parts if value >= _CODES}
            self._clocks = {rank: (clock - self._buckets) % _CLOCKS for rank, clock in clocks.items()}
        return self._values

    @property
    def failed(self) -> dict[int, int]:
        """Rank -> code, for ranks whose reduction raised."""
        self._read()
        return self._failed

    @property
    def clocks(self) -> dict[int, int]:
        """Rank -> number of its committed and used steps, for ranks that contributed data.

        The number is wrong for a rank with other buckets than this rank.
        """
        self._read()
        return self._clocks

    def neutral(self) -> torch.Tensor:
        """Return -0.0, which changes no sum, or NaN if a rank failed; shape (1,), on the device, without a wait."""
        failed = self.vector[: self.world].remainder(_CODES).sum(0, keepdim=True) > 0
        # +0.0 instead would turn an average of -0.0 into +0.0, which is another number to the bit.
        return torch.where(failed, math.nan, -0.0)

    def incomplete(self) -> bool:
        """True if a rank contributed no data."""
        return len(self.clocks) < self.world

    def good(self) -> bool:
        """True if no rank failed, all ranks are at the same step with the same buckets, and all reduced numbers are finite."""
        bad = self._read()[self.world] - self._marks  # not 0 either if another message came instead
        return not self._failed and len(set(self._clocks.values())) <= 1 and bad == 0

    def error(self, name: str, own: BaseException | None, carry_out: CarryOut | None) -> BaseException | None:
        """Return the error that this rank raises for the step; ``None`` if no rank failed.

        Args:
            name: name of the reduction.
            own: exception of this rank.
            carry_out: exchanges the texts if a rank failed. Without it the error has no texts.
        """
        failed = self.failed
        if failed:
            texts = self._texts(own, carry_out) if self.world > 1 and carry_out is not None else {}
            if own is not None:
                return own
            lines = "; ".join(f"rank {r} {WHERE[code]}: {texts.get(r, 'see its log')}" for r, code in failed.items())
            return RemoteHookError(
                f"{name} raised on another rank, so this step's gradients are not valid on any rank. {lines}"
            )
        if own is not None:  # the manager drops a healing member's part of the status, but the member knows its error
            return own
        clocks = self.clocks
        return _out_of_step(name, clocks) if self._foreign or len(set(clocks.values())) > 1 else None

    def _texts(self, own: BaseException | None, carry_out: CarryOut) -> dict[int, str]:
        mine = b"" if own is None else _described(own).encode(errors="replace")[:TEXT_BYTES]
        device = self.vector.device
        text = torch.tensor(list(mine.ljust(TEXT_BYTES, b"\0")), dtype=torch.uint8, device=device)
        received = torch.empty(self.world * TEXT_BYTES, dtype=torch.uint8, device=device)
        carry_out(AllGather(text, received))
        rows = received.view(self.world, TEXT_BYTES).cpu()
        return {r: bytes(rows[r].tolist()).rstrip(b"\0").decode(errors="replace") for r in range(self.world)}


def _described(error: BaseException) -> str:
    """Return type and text of an exception. Its ``__str__`` may raise while peers wait for the text."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return f"{type(error).__name__}, whose text could not be formatted"


def _out_of_step(name: str, clocks: dict[int, int]) -> CommHooksError:
    lines = ", ".join(f"rank {rank}: {clock}" for rank, clock in clocks.items())
    lines = lines or "another message came instead of a rank's status"
    return RankMismatchError(
        f"{name}: the ranks are not at the same step, or have different buckets ({lines}), so the average mixed gradients that "
        "do not belong together. The numbers are committed steps, plus optimizer steps or votes if optimizer=, scaler= or a "
        "manager is given. A rank with other parameters has a number far from the others. Otherwise a rank skipped an optimizer "
        "step, ran one under no_sync(), rolled back, dropped a step, or resumed alone. Give all ranks the same model, load the "
        "same checkpoint on all ranks, or attach again, with link= over a new process group"
    )


def finiteness(tensor: torch.Tensor) -> torch.Tensor | float:
    """Return a number that is finite if all elements are. On a GPU it is a 0-d tensor, so that the host need not wait."""
    if not tensor.is_cpu:  # in a wider type, where a sum does not overflow
        return tensor.sum(dtype=torch.float32 if tensor.dtype.itemsize < 4 else torch.float64)
    if tensor.is_sparse:
        tensor = tensor.coalesce().values()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    total = tensor.sum().item()
    if math.isfinite(total) or not tensor.numel():
        return 0.0
    # The sum of finite elements may overflow. x - x is NaN for Inf and NaN, and 0 otherwise.
    low, high = tensor.aminmax()
    return (low - low + high - high).item()


class Progress(IntEnum):
    """Progress of an outcome, in order. The step runs until the outcome is decided."""

    OPEN = auto()  # buckets arrive, and failures are noted
    SENT = auto()  # this rank has sent its part of the status, so nothing can be added
    DECIDED = auto()  # all parts have arrived; the step is still a draft of the state
    RESOLVED = auto()  # the state has committed the step, or rolled it back


class StepOutcome:
    """Outcome of one step of one engine, from the first bucket to commit or rollback.

    Args:
        name: name of the reduction.
        transport: transport of its group.
        check_finite: True if reduced numbers are checked for NaN and Inf. Only a reduction with state needs it.
        late: error of the previous step, which the host learns only now on a GPU.
        progress: its initial progress.
        weights: weights of the ranks, if the average is weighted.

    Attributes:
        alone: True if this rank decided without its peers.
        unsent: exception after the status was sent, which the status of a later step has to tell.
        progress: its current progress.
    """

    __slots__ = (
        "_batch",
        "_error",
        "_finite",
        "_late",
        "_reads_late",
        "_reported",
        "_status",
        "_sums",
        "alone",
        "check_finite",
        "name",
        "progress",
        "rank",
        "unsent",
        "weights",
        "world_size",
    )

    def __init__(
        self,
        name: str,
        transport: Transport,
        *,
        check_finite: bool = False,
        late: BaseException | None = None,
        progress: Progress = Progress.OPEN,
        weights: StepWeights | None = None,
    ) -> None:
        self.weights = weights
        self.name, self.rank, self.world_size = name, transport.rank, transport.world_size
        self.check_finite, self.progress, self.alone = check_finite, progress, True
        self._error: tuple[BaseException, int] | None = None
        self.unsent: BaseException | None = None
        self._sums: list[torch.Tensor | float] = []
        self._status: Status | None = None
        self._batch: Batch | None = None  # carries the status
        self._late = late
        self._reads_late = self._reported = False
        self._finite = True

    # -- open

    @property
    def failed(self) -> bool:
        """True if this rank has an exception that is not raised yet."""
        return self._error is not None

    def fail(self, error: BaseException, where: int) -> None:
        """Note an exception of this rank. The first one counts."""
        if self.progress is Progress.SENT:
            self.unsent = self.unsent or error
        if self._error is None:
            self._error = (error, where)

    def fail_bucket(self, error: BaseException, where: int, bucket: int) -> None:
        """Note an exception of this rank's reduction and log the bucket. Peers see no line of code."""
        self.fail(error, where)
        with suppress(Exception):  # a handler of the user may raise, while peers are in the step's collectives
            log.error("[rank %d] %s raised %s of bucket %d", self.rank, self.name, WHERE[where], bucket)

    def check(self, reduced: Iterable[torch.Tensor]) -> None:
        """Note if reduced numbers are finite. After the status all ranks must hold the same ones."""
        if self.check_finite and self.unsent is None:  # its NaN are this rank's alone
            self._sums.extend(finiteness(tensor) for tensor in reduced if tensor.is_floating_point())

    # -- open -> sent

    def send(
        self,
        clock: int | None,
        device: torch.device,
        post: Callable[[Request], Batch] | None,
        buckets: int = 0,
        marked: bool = False,
    ) -> None:
        """Send this rank's part of the status.

        Args:
            clock: number of committed and used steps of this rank; ``None`` if it contributes no data.
            device: device of the step's collectives.
            post: starts the message; ``None`` if this rank decides alone.
            buckets: digest of the step's buckets.
            marked: see :class:`Status`.
        """
        code = self._error[1] if self._error is not None else 0
        weights = self.weights.part() if self.weights is not None else None
        self._status = Status(self.rank, self.world_size, code, clock, self._sums, device, buckets, weights, marked)
        self._sums = []
        self._batch = post(self._status.message()) if post is not None else None
        self.alone, self._reads_late = post is None, is_asynchronous(device)
        self.progress = Progress.SENT

    # -- sent -> decided

    def decide(self, timeout: float | None) -> None:
        """Receive the status of all ranks. On a GPU the host does not wait for it."""
        assert self._status is not None  # noqa: S101 - sent before
        batch, self._batch = self._batch, None
        if batch is not None:
            batch.wait(timeout)
        self._status.received()
        if self.weights is not None and self.weights.early:
            self.weights.receive_early(timeout)
        elif self.weights is not None:
            self.weights.received(self._status.weights, alone=self.alone)
        self._finite = all(math.isfinite(one) for one in self._sums)  # of messages after the status
        self._sums = []
        self.progress = Progress.DECIDED

    def write_nan(self, buckets: Iterable[Bucket]) -> None:
        """On a GPU, write NaN into one element of each parameter's average on all ranks if a rank failed.

        The host learns of the failure too late. Without NaN, a scaler on the failed rank would skip the step while scalers on
        its peers would not.
        """
        if not self._reads_late or self._status is None or self.alone:
            return
        firsts: dict[torch.dtype, list[torch.Tensor]] = {}
        for bucket in buckets:
            firsts.setdefault(bucket.dtype, []).extend(bucket.cached(_first_elements, partial(_first_elements, bucket)))
        if firsts:
            neutral = self._status.neutral()
            for dtype, elements in firsts.items():
                torch._foreach_add_(elements, [neutral.to(dtype)] * len(elements))  # lists: one launch, and no wait

    def error(self, carry_out: CarryOut) -> BaseException | None:
        """Return the error that this rank raises at the end of the step.

        On a GPU it is the error of the previous step, because the host would wait for this step's status.

        Args:
            carry_out: exchanges the texts of failed ranks.
        """
        late, self._late = self._late, None
        return late if self._reads_late else self.take_error(None if self.alone else carry_out)

    def take_error(self, carry_out: CarryOut | None = None) -> BaseException | None:
        """Return the error of a decided step once; ``None`` at later calls.

        Args:
            carry_out: exchanges the texts of failed ranks. Without it no peer is needed, and the error has no texts.
        """
        if self._status is None or self.progress < Progress.DECIDED or self._reported:
            return None
        own, self._error, self._reported = self._error, None, True
        error = self._status.error(self.name, own[0] if own else None, carry_out)
        return error or (self.weights.error(self.name) if self.weights is not None else None)

    def good(self) -> bool:
        """True if no rank failed, all ranks are at the same step with the same buckets, and all reduced numbers are finite.

        A weighted step also needs legal weights, and one above 0.
        """
        if self._status is None or not self._finite or not self._status.good():
            return False
        return self.weights is None or (self.weights.error(self.name) is None and self.weights.total > 0)

    def incomplete(self) -> bool:
        """True if a rank contributed no data."""
        return self._status is not None and self._status.incomplete()

    # -- decided -> resolved

    def abandon(self) -> None:
        """Drop a step that never finishes."""
        if self.progress < Progress.DECIDED:
            self._status = self._batch = self._error = None
            self._sums.clear()
            self.progress = Progress.RESOLVED


def _first_elements(bucket: Bucket) -> list[torch.Tensor]:
    """Return a view of one element of each parameter in a bucket, shape (1,) each."""
    if bucket.storage.is_sparse:
        return []
    return [bucket.storage.narrow(0, p.offset, 1) for p in bucket.layout.params if p.numel]
