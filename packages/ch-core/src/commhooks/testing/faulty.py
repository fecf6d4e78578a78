"""Faults to inject into any reduction: an exception at a chosen stage, once."""

from typing import Literal

from commhooks.bucket import Bucket, BucketLayout
from commhooks.compositions.base import Composite
from commhooks.reduction import Reduction, Stages, StepContext
from commhooks.requests import StagePlan, as_tuple

Where = Literal["encode", "between", "decode"]
WHERE: tuple[Where, ...] = ("encode", "between", "decode")


class Injected(RuntimeError):
    """The exception that :class:`Faulty` raises."""


class Faulty(Composite):
    """A reduction that raises :class:`Injected` when it is told to, and else does what ``inner`` does.

    Args:
        inner: the reduction under test.

    Example:
        >>> from commhooks.reduction import Plain
        >>> faulty = Faulty(Plain())
        >>> faulty.arm("decode")     # the next bucket fails after its last collective
        >>> faulty.armed
        'decode'
    """

    name = "faulty"

    def __init__(self, inner: Reduction) -> None:
        super().__init__(inner)
        self.piece_bytes = inner.piece_bytes  # it is compared with the one it wraps
        self.armed: Where | None = None

    def arm(self, where: Where) -> None:
        """Fail at the next bucket: before its first collective, between two, or after the last."""
        self.armed = where

    def plan(self, layout: BucketLayout, ctx: StepContext) -> tuple[StagePlan, ...]:
        return self.inner.plan(layout, ctx)

    def run(self, bucket: Bucket, ctx: StepContext) -> Stages:
        where, self.armed = self.armed, None
        inner = self.inner.start(bucket, ctx)
        try:
            if where == "encode":
                raise Injected("injected at encode")
            for number, requests in enumerate(inner):
                if where == "between" and number == 1:
                    raise Injected("injected between collectives")
                yield as_tuple(requests)
            if where is not None:  # a bucket of one stage has no between
                raise Injected("injected at decode")
        finally:
            inner.close()
