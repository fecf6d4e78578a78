"""The stateless reductions: exact average, 16-bit averages, and nothing at all."""

from typing import Literal

from commhooks import Bucket, Plain, Reduction, Requests, Stages, StepContext, WireCast

Accumulate = Literal["wire", "fp32"]
Rounding = Literal["nearest", "stochastic"]


def allreduce() -> Plain:
    """The exact average; to the bit what DDP computes without a hook."""
    return Plain()


def fp16_compress(accumulate: Accumulate = "wire", rounding: Rounding = "nearest") -> WireCast:
    """The average with fp16 on the wire. Divided before the cast: 66 000 on one rank of two survives."""
    return WireCast(Plain(), "fp16", accumulate=accumulate, rounding=rounding, name="fp16_compress")


def bf16_compress(accumulate: Accumulate = "wire", rounding: Rounding = "nearest") -> WireCast:
    """The average with bf16 on the wire, on every backend that reduces bf16 (gloo does)."""
    return WireCast(Plain(), "bf16", accumulate=accumulate, rounding=rounding, name="bf16_compress")


class Noop(Reduction):
    """No communication: every rank keeps its own gradient. For measuring head-room, not for training."""

    name = "noop"
    collectives = frozenset()
    lossy = True

    def run(self, bucket: Bucket, ctx: StepContext) -> Stages:
        nothing: tuple[Requests, ...] = ()
        yield from nothing


def noop() -> Noop:
    """See :class:`Noop`."""
    return Noop()
