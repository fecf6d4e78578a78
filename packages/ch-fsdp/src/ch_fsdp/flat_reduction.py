"""The one reduction of this package: the sum of a flat gradient, whole or scattered.

``result = (premultiply * g_1 + ... + premultiply * g_W) / divide``, and each rank keeps all of it (FSDP1's NO_SHARD) or
its own W-th (every sharded strategy, FSDP2). Which factors apply differs between FSDP1 (a power of two before, the
rest after, against overflow in 16 bits) and FSDP2 (what the ``op`` that torch passes means); what travels on the wire
is :class:`commhooks.compositions.wire_cast.WireCast` around it, fp32 accumulation included.
"""

from collections.abc import Hashable
from typing import Literal

import torch

from commhooks import (
    AllReduce,
    Bucket,
    BucketLayout,
    HookNotSupportedError,
    ParamLayout,
    Plain,
    ReduceScatter,
    Reduction,
    Stages,
    StepContext,
    WireCast,
)

_WIRE_NAMES = {dtype: name for name, dtype in WireCast.DTYPES.items()}


class FlatSum(Reduction):
    """All-reduce or reduce-scatter of a bucket's storage as one vector.

    Args:
        scatter: whether each rank keeps only its part.

    Attributes:
        output: where this rank's part goes; set before each run, ``world_size`` times smaller than the bucket.
        op: ``"sum"``, or ``"mean"``, which divides by the world size before any cast.
        premultiply: factor before the sum.
        divide: divisor after it.

    Example:
        >>> from commhooks.requests import StagePlan
        >>> layout = BucketLayout.of_shapes({"flat": (8,)})
        >>> [r.kind for stage in FlatSum(scatter=True).plan(layout, StepContext(world_size=2)) for r in stage]
        ['reduce_scatter']
    """

    granularity = "bucket"

    def __init__(self, *, scatter: bool) -> None:
        self.scatter = scatter
        self.name = "reduce_scatter" if scatter else "allreduce"
        self.trips = 1 if scatter else 2
        self.collectives = frozenset({"reduce_scatter" if scatter else "all_reduce"})
        self.output: torch.Tensor | None = None
        self.op: Literal["sum", "mean"] = "sum"
        self.premultiply = 1.0
        self.divide = 1.0

    def phase(self, step: int) -> Hashable:
        return self.op

    def run(self, bucket: Bucket, ctx: StepContext) -> Stages:
        flat = bucket.storage  # (W * n,)
        if self.premultiply != 1.0:
            flat.mul_(self.premultiply)
        result = self._result(flat, ctx.world_size)
        yield ReduceScatter(flat, result, self.op) if self.scatter else AllReduce(flat, self.op)
        if self.divide != 1.0:
            result.div_(self.divide)

    def _result(self, flat: torch.Tensor, world_size: int) -> torch.Tensor:
        if not self.scatter:
            return flat
        if flat.is_meta or self.output is None:  # planning: no numbers
            return flat.new_empty(flat.numel() // world_size)
        return self.output


def flat_bucket(name: str, flat: torch.Tensor) -> Bucket:
    """A whole flat gradient as a bucket of one entry."""
    return Bucket(flat_layout({name: flat.numel()}, flat.dtype, flat.device), flat)


def flat_layout(numels: dict[str, int], dtype: torch.dtype, device: torch.device) -> BucketLayout:
    """Flat gradients, one after another, as one virtual bucket."""
    entries, offset = [], 0
    for name, numel in numels.items():
        entries.append(ParamLayout(name, (numel,), (1,), offset))
        offset += numel
    return BucketLayout(entries, offset, dtype, device)


def is_cast(reduction: Reduction) -> bool:
    """Whether this is plain averaging on a 16-bit wire."""
    return isinstance(reduction, WireCast) and isinstance(reduction.inner, Plain)


def fits_flat(reduction: Reduction) -> bool:
    """Whether a reduction means the same on a flat vector as on named gradients: plain averaging and its casts."""
    return isinstance(reduction, Plain) or is_cast(reduction)


def flat_version(reduction: Reduction, *, scatter: bool) -> tuple[FlatSum, Reduction]:
    """What ``reduction`` is on flat gradients: the sum inside (to be told the factors), and what to run.

    Raises:
        HookNotSupportedError: it needs parameters with names and shapes.
    """
    if not fits_flat(reduction):
        raise HookNotSupportedError(f"{reduction!r} cannot work on flat gradients: it needs each parameter's own shape")
    flat = FlatSum(scatter=scatter)
    if not isinstance(reduction, WireCast):
        return flat, flat
    wire = reduction.wire
    dtype = _WIRE_NAMES[wire.dtype]
    cast = WireCast(flat, dtype, accumulate=reduction.accumulate, rounding=wire.rounding)  # type: ignore[arg-type]
    cast.name = reduction.name  # shown as what was attached
    return flat, cast
