"""The sum of a flat gradient, whole or scattered: plain averaging and its casts for FSDP1's hooks and FSDP2's shard axis.

``result = (premultiply * g_1 + ... + premultiply * g_W) / divide``. Each rank keeps the whole result (FSDP1's
``NO_SHARD``) or its own W-th (every sharded strategy, FSDP2). FSDP1 multiplies by a power of two before the sum and divides
by the rest after it, against overflow in 16 bits. FSDP2's factors follow from the ``op`` that torch passes.
:class:`commhooks.WireCast` around the sum decides the dtype on the wire and the accumulation in fp32.
"""

from collections.abc import Hashable
from typing import Literal

import torch

from ch_wrappers import WireCast
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
)

_WIRE_NAMES = {dtype: name for name, dtype in WireCast.DTYPES.items()}


class FlatSum(Reduction):
    """All-reduce or reduce-scatter of a bucket's storage as one vector.

    Args:
        scatter: True if each rank keeps only its part.

    Attributes:
        output: tensor for this rank's part, ``(n,)`` for a bucket of ``W * n`` elements. Set it before each run.
        op: ``"sum"``, or ``"mean"``, which divides by the world size before any cast.
        premultiply: factor before the sum.
        divide: divisor after the sum.

    Example:
        >>> from ch_core import StagePlan
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
        if flat.is_meta or self.output is None:  # the engine plans from shapes alone
            return flat.new_empty(flat.numel() // world_size)
        return self.output


def flat_bucket(name: str, flat: torch.Tensor, output: torch.Tensor | None = None) -> Bucket:
    """Return a whole flat gradient, ``(numel,)``, as a bucket of one entry. ``output`` receives this rank's part, if any."""
    return Bucket(flat_layout({name: flat.numel()}, flat.dtype, flat.device), flat, output=output)


def flat_layout(numels: dict[str, int], dtype: torch.dtype, device: torch.device) -> BucketLayout:
    """Return flat gradients, one after another, as the layout of one virtual bucket."""
    entries, offset = [], 0
    for name, numel in numels.items():
        entries.append(ParamLayout(name, (numel,), (1,), offset))
        offset += numel
    return BucketLayout(entries, offset, dtype, device)


def is_cast(reduction: Reduction) -> bool:
    """Return True for plain averaging on a 16-bit wire."""
    return isinstance(reduction, WireCast) and isinstance(reduction.inner, Plain)


def fits_flat(reduction: Reduction) -> bool:
    """Return True if a reduction needs no parameter names and shapes: plain averaging and its casts."""
    return isinstance(reduction, Plain) or is_cast(reduction)


def flat_version(reduction: Reduction, *, scatter: bool) -> tuple[FlatSum, Reduction]:
    """Return ``reduction`` for flat gradients: the sum inside, which takes the factors, and the reduction to run.

    Raises:
        HookNotSupportedError: the reduction needs parameters with names and shapes.
    """
    if not fits_flat(reduction):
        raise HookNotSupportedError(
            f"{reduction!r} cannot work on flat gradients, because it needs the shape of each parameter. Plain averaging "
            "and its casts can: use 'allreduce', 'reduce_scatter', 'fp16_compress' or 'bf16_compress'"
        )
    flat = FlatSum(scatter=scatter)
    if not isinstance(reduction, WireCast):
        return flat, flat
    dtype = _WIRE_NAMES[reduction.wire.dtype]
    cast = WireCast(flat, dtype, accumulate=reduction.accumulate)  # type: ignore[arg-type]
    cast.name = reduction.name  # reports show the attached name
    return flat, cast
