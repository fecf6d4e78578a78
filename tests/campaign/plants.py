"""Hooks that are wrong on purpose. A campaign must find each of them."""

from typing import Any, ClassVar

import commhooks
from commhooks import AllReduce, Bucket, Reduction


class Scaled(Reduction):
    """Rank 1 is wrong by one per cent."""

    name = "planted_scaled"
    lossy = False

    def run(self, bucket: Bucket, ctx: Any) -> Any:
        yield AllReduce(bucket.buffer)
        if ctx.rank == 1:
            bucket.buffer.mul_(1.01)


class Wrong(Scaled):
    """Every rank is wrong by one per cent. Only the comparison with the true mean finds it."""

    name = "planted_wrong"

    def run(self, bucket: Bucket, ctx: Any) -> Any:
        yield AllReduce(bucket.buffer)
        bucket.buffer.mul_(1.01)


class Forgetful(Reduction):
    """Sends half of every gradient, keeps the other half as a residual, and never reads it."""

    name = "planted_forgetful"
    lossy = True
    fields: ClassVar[dict[str, Any]] = {"residual": "local"}

    def run(self, bucket: Bucket, ctx: Any) -> Any:
        for param, gradient in bucket.views():
            gradient.mul_(0.5)
            ctx.write(param.name, "residual", param.shape, device=bucket.device).copy_(gradient)
        yield AllReduce(bucket.buffer)


PLANTS = {kind.__name__.lower(): kind for kind in (Scaled, Wrong, Forgetful)}


def make(expr: str) -> Any:
    """Return the argument of ``attach`` for an expression of a case."""
    scheme, _, name = expr.partition(":")
    if scheme == "planted":
        return PLANTS[name]()
    if scheme == "torch":
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        hook = default_hooks.allreduce_hook
        return default_hooks.bf16_compress_wrapper(hook) if name == "bf16_compress_wrapper" else hook
    return commhooks.create(expr)
