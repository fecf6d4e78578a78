"""Hooks that are wrong on purpose. A campaign must find each of them."""

import os
import subprocess
import sys
import time
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


class Hanging(Scaled):
    """Rank 0 never starts its collective."""

    name = "planted_hanging"

    def run(self, bucket: Bucket, ctx: Any) -> Any:
        if ctx.rank == 0 and ctx.step == 1:
            time.sleep(3600)
        yield AllReduce(bucket.buffer)


class Dying(Scaled):
    """Rank 0 ends without an error."""

    name = "planted_dying"

    def run(self, bucket: Bucket, ctx: Any) -> Any:
        if ctx.rank == 0 and ctx.step == 1:
            os._exit(3)
        yield AllReduce(bucket.buffer)


class Orphaning(Scaled):
    """The result is right, but a process remains."""

    name = "planted_orphaning"

    def run(self, bucket: Bucket, ctx: Any) -> Any:
        if ctx.rank == 0 and ctx.step == 0 and bucket.is_last:
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], stdout=subprocess.DEVNULL)
        yield AllReduce(bucket.buffer)


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


PLANTS = {kind.__name__.lower(): kind for kind in (Scaled, Wrong, Hanging, Dying, Orphaning, Forgetful)}


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
