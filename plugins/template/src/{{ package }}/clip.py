"""Clip gradients element by element. This module holds the wrapper."""

from typing import Any

import torch

from commhooks import Bucket, Composite, Reduction, Stages, StepContext, composed


class Clip(Composite):
    """Run ``inner`` on ``clamp(g, -limit, limit)``. NaN and Inf are not clipped.

    Args:
        inner: the reduction to wrap.
        limit: largest magnitude that is not clipped.
    """

    name = "clip"
    lossy = True

    def __init__(self, inner: Reduction, limit: float = 1000.0) -> None:
        super().__init__(inner)
        self.limit = limit

    def config(self) -> dict[str, Any]:
        return {"limit": self.limit}

    def run(self, bucket: Bucket, ctx: StepContext) -> Stages:
        for _, gradient in bucket.views():
            if not (gradient.is_sparse or gradient.is_complex()):
                # clamp() refuses a limit that the gradient's dtype cannot hold (1e6 in fp16).
                limit = min(self.limit, torch.finfo(gradient.dtype).max)
                # A GradScaler must see Inf, so clip finite numbers only.
                gradient.copy_(gradient.clamp(-limit, limit).where(gradient.isfinite(), gradient))
        return self.inner.start(bucket, ctx)


def clip(hook: Any, limit: float = 1000.0) -> Any:
    """Return ``hook`` with clipped gradients, as a reduction or as a DDP hook."""
    return composed("clip", [hook], lambda parts: Clip(parts[0], limit))
