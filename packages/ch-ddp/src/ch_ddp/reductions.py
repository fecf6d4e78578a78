"""Stateless reductions: the exact average, 16-bit averages, and no communication."""

from typing import Literal

from ch_wrappers import WireCast
from commhooks import Bucket, BucketLayout, Plain, Reduction, Requests, Stages, StepContext

Accumulate = Literal["wire", "fp32"]


def allreduce() -> Plain:
    """Return the exact average, equal to the bit to DDP without a hook."""
    return Plain()


def fp16_compress(accumulate: Accumulate = "wire") -> WireCast:
    """Return the average with fp16 on the wire. The division comes before the cast, so 66 000 on one of two ranks fits."""
    return WireCast(Plain(), "fp16", accumulate=accumulate, name="fp16_compress")


def bf16_compress(accumulate: Accumulate = "wire") -> WireCast:
    """Return the average with bf16 on the wire, for every backend that reduces bf16 (gloo does)."""
    return WireCast(Plain(), "bf16", accumulate=accumulate, name="bf16_compress")


class Noop(Reduction):
    """No communication: every rank keeps its own gradient. Use it for measurements, not for training."""

    name = "noop"
    collectives = frozenset()
    lossy = True

    def keeps_equal(self, name: str) -> bool:
        return False

    def routes(self, layout: BucketLayout, step: int) -> dict[str, str]:
        return {}  # sparse and complex gradients stay local too

    def run(self, bucket: Bucket, ctx: StepContext) -> Stages:
        nothing: tuple[Requests, ...] = ()
        yield from nothing


def noop() -> Noop:
    """Return :class:`Noop`."""
    return Noop()
