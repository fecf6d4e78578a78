"""The dry run on meta tensors refuses wrong reductions before any rank sends a message."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from ch_core.reduce_scatter import Scattered
from ch_core.requests import payload_bytes
from ch_wrappers import WireCast
from commhooks import (
    AllGather,
    AllReduce,
    AllToAll,
    Bucket,
    BucketLayout,
    HookConfigError,
    HookResultError,
    Plain,
    ReduceScatter,
    Reduction,
    ShardLayout,
    StepContext,
)
from commhooks.registry.build import as_reduction

LAYOUT = BucketLayout.of_shapes({"w": (3, 2)})


class Asks(Reduction):
    """Yields the object that `make` builds from a bucket's size and the number of ranks."""

    name = "asks"

    def __init__(self, make: Callable[[int, int], Any]) -> None:
        self.make = make

    def run(self, bucket: Bucket, ctx: StepContext) -> Iterator[Any]:
        yield AllReduce(bucket.buffer)
        yield self.make(6, ctx.world_size)


def of(numel: int) -> torch.Tensor:
    return torch.zeros(numel, device="meta")


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda n, w: AllReduce(of(n), op="avg"), r"AllReduce\(op='avg'\): expected one of 'mean', 'sum', 'max'"),
        (lambda n, w: ReduceScatter(of(n), of(n // w), op="min"), r"ReduceScatter\(op='min'\): expected one of"),
        (
            lambda n, w: AllGather(of(n), of(n)),
            r"6 elements for an input of 6 over 3 ranks; it needs 18, ctx.world_size",
        ),
        (lambda n, w: ReduceScatter(of(n), of(n)), r"output has 6 .* over 3 ranks; it needs 2, the input divided by"),
        (lambda n, w: ReduceScatter(of(n + 1), of(2)), r"an input of 7 elements cannot be cut into 3 equal parts"),
        (lambda n, w: AllToAll(of(n), of(n * w)), r"AllToAll: output has 18 .* it needs 6, as many as the input"),
        (
            lambda n, w: AllToAll(of(4), of(4)),
            r"AllToAll: an input of 4 elements cannot be cut into 3 equal parts, one for each rank; pad it",
        ),
    ],
)
def test_the_dry_run_refuses_requests_that_no_transport_supports(make: Callable[[int, int], Any], text: str) -> None:
    with pytest.raises(HookResultError, match=rf"asks, stage 1: .*{text}"):
        Asks(make).plan(LAYOUT, StepContext(world_size=3))


class NoYield(Reduction):
    name, lossy = "no_yield", True

    def run(self, bucket: Bucket, ctx: StepContext) -> Any:
        AllReduce(bucket.buffer)


def no_yield(bucket: Bucket, ctx: StepContext) -> None:
    AllReduce(bucket.buffer)


def test_a_run_without_a_yield_is_refused() -> None:
    with pytest.raises(HookResultError, match=r"no_yield: run\(\) returned NoneType\. It must be a generator"):
        NoYield().plan(LAYOUT, StepContext())
    with pytest.raises(HookConfigError, match=r"no_yield\(bucket, ctx\) has no yield"):
        as_reduction(no_yield)


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("inner", [Plain(), WireCast(Plain(), "bf16")], ids=repr)
def test_a_selection_of_a_scattered_bucket_counts_all_of_its_bytes(inner: Reduction, world_size: int) -> None:
    """handle.report() plans each group of parameters separately. Their sum must equal the engine's count."""
    made = Scattered(inner)
    cut = ShardLayout.of(BucketLayout.of_shapes({"w": (5, 2), "b": (3,), "v": (8, 4)}), world_size)
    n = cut.part.numel
    whole = made.bucket(cut, torch.zeros(world_size * n), torch.zeros(n)).layout
    ctx = StepContext(world_size=world_size)
    parts = [payload_bytes(made.plan(whole.select(frozenset(names)), ctx)) for names in (("w", "v"), ("b",))]
    assert sum(parts) == payload_bytes(made.plan(whole, ctx))
    assert parts[1] * n == sum(parts) * -(-3 // world_size)
