"""What becomes of one step: one object with one life.

``OPEN`` while buckets arrive: what fails, or is not finite, is noted. ``SENT`` when this rank's part of the status is on its
way, and nothing can be added any more. ``DECIDED`` when all ranks' parts have come: they all see the same, and decide alike.
``TENTATIVE`` while its gradients wait to be used with the next ones (:mod:`commhooks.engine.open_steps`). ``COMMITTED`` or
``ROLLED_BACK`` in the end.
"""

import logging
from collections.abc import Callable, Iterable
from contextlib import suppress
from enum import Enum, auto
from functools import partial

import torch

from commhooks.bucket import Bucket
from commhooks.engine.stage import Stage
from commhooks.engine.status import WHERE, Exchange, Status, finiteness
from commhooks.requests import Request
from commhooks.transport.base import Transport

log = logging.getLogger("commhooks")


class Phase(Enum):
    """How far a outcome has come."""

    OPEN = auto()
    SENT = auto()
    DECIDED = auto()
    TENTATIVE = auto()
    COMMITTED = auto()
    ROLLED_BACK = auto()


def told_late(device: torch.device) -> bool:
    """Whether what became of a step is read when the next one begins: the host would wait for the device."""
    return device.type == "cuda"


class StepOutcome:
    """Outcome of one step of one engine.

    Args:
        name: of the reduction.
        transport: of its group.
        looks: whether somebody has to know if what was reduced is finite: a reduction without state has nothing to undo.
        late: an error of the step before, which on CUDA becomes known only now.
        phase: how far it has come.

    Attributes:
        counted: whether this rank's numbers counted; without them it cannot know what becomes of the step.
        alone: whether it was decided without the other ranks.
    """

    __slots__ = (
        "_error",
        "_late",
        "_on_cuda",
        "_stage",
        "_status",
        "_sums",
        "_told",
        "alone",
        "counted",
        "looks",
        "name",
        "phase",
        "rank",
        "world_size",
    )

    def __init__(
        self,
        name: str,
        transport: Transport,
        *,
        looks: bool = False,
        late: BaseException | None = None,
        phase: Phase = Phase.OPEN,
    ) -> None:
        self.name, self.rank, self.world_size = name, transport.rank, transport.world_size
        self.looks, self.phase, self.counted, self.alone = looks, phase, True, True
        self._error: tuple[BaseException, int] | None = None
        self._sums: list[torch.Tensor | float] = []
        self._status: Status | None = None
        self._stage: Stage | None = None
        self._late = late
        self._on_cuda = self._told = False

    # -- open

    @property
    def running(self) -> bool:
        """Whether the step has not been decided yet."""
        return self.phase in (Phase.OPEN, Phase.SENT)

    @property
    def failed(self) -> bool:
        """Whether this rank's reduction raised, and nobody has been told yet."""
        return self._error is not None

    def fail(self, error: BaseException, where: int) -> None:
        """This rank's reduction raised; the first error counts."""
        if self._error is None:
            self._error = (error, where)

    def report(self, error: BaseException, where: int, bucket: int) -> None:
        """:meth:`fail` in a bucket, and say so in the log: the other ranks name no line of code."""
        self.fail(error, where)
        with suppress(Exception):  # a handler of the user may raise, while peers are in the step's collectives
            log.error("[rank %d] %s raised %s of bucket %d", self.rank, self.name, WHERE[where], bucket)

    def look(self, reduced: Iterable[torch.Tensor]) -> None:
        """Note whether these numbers are finite."""
        if self.looks:
            self._sums.extend(finiteness(tensor) for tensor in reduced if tensor.is_floating_point())

    # -- open -> sent

    def send(self, clock: int | None, device: torch.device, post: Callable[[Request], Stage] | None) -> None:
        """Make this rank's part of the status, and send it.

        Args:
            clock: steps behind this rank; ``None`` if it does not count.
            device: where the collectives of the step happened.
            post: starts the message; ``None`` where nobody else takes part.
        """
        code = self._error[1] if self._error is not None else 0
        self._status = Status(self.rank, self.world_size, code, clock, self._sums, device)
        self._sums = []
        self._stage = post(self._status.message()) if post is not None else None
        self.counted, self.alone, self._on_cuda = clock is not None, post is None, told_late(device)
        self.phase = Phase.SENT

    # -- sent -> decided

    def decide(self, timeout: float | None) -> None:
        """Receive what the others said. On CUDA the host does not wait for it."""
        assert self._status is not None  # noqa: S101 - sent before
        stage, self._stage = self._stage, None
        if stage is not None:
            stage.wait(timeout)
        self._status.received()
        self.phase = Phase.DECIDED

    def spoil(self, buckets: Iterable[Bucket]) -> None:
        """Where the host learns too late that a rank's reduction raised: leave NaN in every parameter's average on all ranks.
        Otherwise a scaler on the rank that failed would skip the step, and those of the others would not.
        """
        if not self._on_cuda or self._status is None or self.alone:
            return
        firsts: dict[torch.dtype, list[torch.Tensor]] = {}
        for bucket in buckets:
            firsts.setdefault(bucket.dtype, []).extend(bucket.cached(_first_numbers, partial(_first_numbers, bucket)))
        if firsts:
            neutral = self._status.neutral()
            for dtype, numbers in firsts.items():
                torch._foreach_add_(numbers, [neutral.to(dtype)] * len(numbers))  # by lists: one launch, and no wait

    def error(self, carry_out: Exchange) -> BaseException | None:
        """The error that this rank raises at the end of the step: on CUDA the one of the step before, because reading
        this one's would make the host wait.

        Args:
            carry_out: for the failing ranks' texts.
        """
        late, self._late = self._late, None
        return late if self._on_cuda else self.take_error(None if self.alone else carry_out)

    def take_error(self, carry_out: Exchange | None = None) -> BaseException | None:
        """The error of the step, if it is decided and nobody has been told of it yet.

        Args:
            carry_out: for the failing ranks' texts; without it, which needs no other rank, there are none.
        """
        if self._status is None or self.running or self._told:
            return None
        own, self._error, self._told = self._error, None, True
        return self._status.error(self.name, own[0] if own else None, carry_out)

    def good(self) -> bool:
        """Whether no rank failed, all are at the same step, and everything reduced was finite."""
        return self._status is not None and self._status.good()

    def incomplete(self) -> bool:
        """Whether a rank did not count: it had run out of input."""
        return self._status is not None and self._status.incomplete()

    # -- decided -> the end

    def end(self, phase: Phase) -> None:
        """Committed, rolled back, or committed tentatively."""
        self.phase = phase

    def abandon(self) -> None:
        """The step never finishes."""
        if self.running:
            self._status = self._stage = self._error = None
            self._sums.clear()
            self.phase = Phase.ROLLED_BACK


def _first_numbers(bucket: Bucket) -> list[torch.Tensor]:
    """One number of each parameter's place in a bucket, ``(1,)`` each."""
    if bucket.storage.is_sparse:
        return []
    return [bucket.storage.narrow(0, p.offset, 1) for p in bucket.layout.params if p.numel]
