"""A small reduction with both kinds of state, in two stages like PowerSGD. A test can compute it by hand."""

from typing import ClassVar, Literal

import torch

from commhooks import AllReduce, Bucket, Reduction, Stages, StepContext


class TwoStage(Reduction):
    """Sends a bucket rounded down to whole numbers and keeps the rest as residual. It then sends the sum of the
    results.

    ``residual`` is local. ``seen`` holds the last step's mean and is equal on all ranks.
    """

    name = "two_stage"
    lossy = True
    fields: ClassVar[dict[str, Literal["local", "shared"]]] = {"residual": "local", "seen": "shared"}

    def run(self, bucket: Bucket, ctx: StepContext) -> Stages:
        for p, gradient in bucket.views():
            kept = ctx.read(p.name, "residual")
            whole = gradient if kept is None else gradient.add_(kept)
            rest = ctx.write(p.name, "residual", p.shape, bucket.dtype, bucket.device)
            torch.sub(whole, whole.floor(), out=rest)
            whole.sub_(rest)
        yield tuple(AllReduce(run) for run in bucket.segments())
        for p, received in bucket.views():
            ctx.write(p.name, "seen", p.shape, bucket.dtype, bucket.device).copy_(received)
        check = ctx.scratch("check", (1,), bucket.dtype, bucket.device)
        check.copy_(bucket.buffer.sum().reshape(1))
        yield AllReduce(check)
