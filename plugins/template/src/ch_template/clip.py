"""The wrapper: something done to the gradient before the inner hook gets it."""

from collections.abc import Hashable
from typing import Any

from commhooks import Bucket, BucketLayout, Reduction, Stages, StepContext, composed


class Clip(Reduction):
    """``inner`` on ``clamp(g, -limit, limit)``; NaN stays NaN and inf is clipped on no rank.

    Args:
        inner: the reduction to wrap.
        limit: largest magnitude that is left as it is.
    """

    lossy = True

    def __init__(self, inner: Reduction, limit: float = 1000.0) -> None:
        self.inner, self.limit, self.name = inner, limit, f"clip({inner.name})"
        # What is declared of a wrapper follows from what it wraps.
        self.granularity, self.collectives = inner.granularity, inner.collectives
        self.fields = inner.fields  # type: ignore[misc]

    def config(self) -> dict[str, Any]:
        return {"limit": self.limit}

    def phase(self, step: int) -> Hashable:
        return self.inner.phase(step)

    def routes(self, layout: BucketLayout, step: int) -> dict[str, str]:
        return self.inner.routes(layout, step)

    def check(self, layout: BucketLayout) -> None:
        self.inner.check(layout)

    def start(self, bucket: Bucket, ctx: StepContext) -> Stages:
        return self.run(bucket, ctx)

    def run(self, bucket: Bucket, ctx: StepContext) -> Stages:
        for _, gradient in bucket.views():
            if not (gradient.is_sparse or gradient.is_complex()):
                # A GradScaler has to see inf: clip what is finite only.
                gradient.copy_(gradient.clamp(-self.limit, self.limit).where(gradient.isfinite(), gradient))
        return self.inner.start(bucket, ctx)


def clip(hook: Any, limit: float = 1000.0) -> Any:
    """``hook`` with clipped gradients: a reduction for a reduction, a DDP hook for one of those."""
    return composed("clip", [hook], lambda parts: Clip(parts[0], limit))
