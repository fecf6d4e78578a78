"""Injects an exception into any reduction, once, at a chosen stage."""

from typing import Literal

from ch_core import StagePlan, as_tuple
from commhooks import Bucket, BucketLayout, Composite, Reduction, Stages, StepContext

Where = Literal["encode", "between", "decode"]
WHERE: tuple[Where, ...] = ("encode", "between", "decode")


class Injected(RuntimeError):
    """The exception that :class:`Faulty` raises."""


class Faulty(Composite):
    """Raises :class:`Injected` after :meth:`arm`; otherwise works as ``inner``.

    Args:
        inner: the reduction under test.

    Example:
        >>> from commhooks import Plain
        >>> faulty = Faulty(Plain())
        >>> faulty.arm("decode")     # the next bucket fails after its last collective
        >>> faulty.armed
        'decode'
    """

    name = "faulty"

    def __init__(self, inner: Reduction) -> None:
        super().__init__(inner)
        self.piece_bytes = inner.piece_bytes  # tests compare it with ``inner``
        self.armed: Where | None = None

    def arm(self, where: Where) -> None:
        """Fail at the next bucket, before its first collective, between two, or after the last."""
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
            if where is not None:  # a bucket of one stage has no place between two
                raise Injected("injected at decode")
        finally:
            inner.close()
