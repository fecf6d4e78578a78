"""Wrappers that use ``Composite``: methods that they forward, their names, and attributes that they do not inherit."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ch_core import SimulatedRank, simulate
from ch_core.engine.residual_norms import residual_figures, residual_norms
from ch_wrappers import WireCast
from ch_wrappers.error_feedback import error_feedback
from ch_wrappers.policy import policy
from ch_wrappers.warmup import warmup
from commhooks import (
    AllGather,
    AllReduce,
    Bucket,
    BucketLayout,
    Composite,
    HookConfigError,
    Plain,
    Reduction,
    StepContext,
    canonical,
)

SHAPES = {"norm.weight": (5,), "up.weight": (7, 6), "up.bias": (7,), "down.weight": (6, 7), "down.bias": (6,)}


class Large(Reduction):
    """Sends the elements larger than 1, and reports them."""

    name, lossy, reports_sent = "large", True, True

    def run(self, bucket: Bucket, ctx: StepContext) -> Iterator[Any]:
        bucket.buffer.mul_(bucket.buffer > 1)
        if ctx.sent is not None:
            ctx.sent.buffer.copy_(bucket.buffer)
        yield AllReduce(bucket.buffer)


def test_residual_figures_cover_transposed_parameters() -> None:
    """A bucket stores a parameter in memory order, and its residual has the parameter's own shape."""

    def held(like: torch.Tensor) -> dict[str, float]:
        def body(rank: SimulatedRank) -> dict[str, float]:
            engine = rank.engine(error_feedback(Large()))
            for _ in range(2):  # telemetry makes the engine keep its buckets, from the first figures on
                bucket = Bucket(BucketLayout.of_tensors({"w": like}), torch.zeros(like.numel()))
                gradient = torch.randn(like.shape, generator=torch.Generator().manual_seed(rank.rank))
                bucket.view("w").copy_(gradient)
                engine.submit(bucket)
                assert engine.finish() is None
                figures = residual_figures(residual_norms(engine))
                engine.rollback()
            return figures

        return simulate(2, body)[0]

    plain, turned = held(torch.empty(8, 6)), held(torch.empty(6, 8).t())
    assert plain.keys() == turned.keys() == {"residual_norm/w", "relative_error/w"}
    assert all(turned[key] == pytest.approx(value, rel=1e-5) for key, value in plain.items())


class Kept(Reduction):
    """Keeps the average that it sends, for matrices only."""

    name, lossy = "kept", True
    fields = {"last": "shared"}

    def route(self, param: Any, step: int) -> str | None:
        return "1-D" if len(param.shape) < 2 else None

    def run(self, bucket: Bucket, ctx: StepContext) -> Iterator[Any]:
        yield from Plain().run(bucket, ctx)
        for p, view in bucket.views():
            ctx.write(p.name, "last", p.shape, device=bucket.device).copy_(view)


class Gathered(Reduction):
    """Averages by all-gather."""

    name, collectives = "gathered", frozenset({"all_gather"})

    def run(self, bucket: Bucket, ctx: StepContext) -> Iterator[Any]:
        everyone = ctx.scratch("all", (ctx.world_size, bucket.buffer.numel()), device=bucket.device)
        yield AllGather(bucket.buffer, everyone.view(-1))
        bucket.buffer = everyone.mean(0)


RULES = {"*.norm*": Plain(), "*.bias": WireCast(Plain(), "bf16"), "*": Kept()}


class Doubled(Composite):
    """Doubles the inner average, and adds a field."""

    name = "doubled"
    fields = {"count": "shared"}

    def __init__(self, inner: Reduction, times: int = 2) -> None:
        super().__init__(inner)
        self.times = times

    def config(self) -> dict[str, Any]:
        return {"times": self.times}

    def run(self, bucket: Bucket, ctx: StepContext) -> Iterator[Any]:
        yield from self.inner.start(bucket, ctx)
        bucket.buffer = bucket.buffer * self.times


def test_a_wrapper_forwards_the_declarations_of_its_part_and_adds_its_own() -> None:
    layout = BucketLayout.of_shapes(SHAPES)
    mixed = warmup(policy(RULES), steps=2)
    outer = Doubled(mixed)
    assert (outer.granularity, outer.collectives, outer.lossy, outer.trips) == ("tensor", {"all_reduce"}, True, 2)
    assert dict(outer.fields) == {"last": "shared", "count": "shared"}
    assert Doubled(Gathered()).collectives == {"all_gather"}
    for step in (0, 2):
        assert outer.routes(layout, step) == mixed.routes(layout, step)
        assert [outer.label(p, step) for p in layout.params] == [
            f"doubled({mixed.label(p, step)})" for p in layout.params
        ]
    assert outer.phase(0) != outer.phase(2)
    with pytest.raises(HookConfigError, match=r"matches norm\.weight"):
        Doubled(policy({"*.bias": Plain(), "up.*": Plain()})).check(layout)


def test_the_identity_of_a_wrapper_follows_from_name_options_and_parts() -> None:
    outer = Doubled(WireCast(Kept(), "bf16"), times=3)
    assert outer.name == "doubled(bf16_wrapper(kept))"
    assert repr(outer) == "doubled(bf16_wrapper(kept), times=3)"
    assert canonical(repr(outer)) == outer.node()
    named = WireCast(Plain(), "bf16", name="bf16_compress")
    assert (named.name, named.node()) == ("bf16_compress", {"hook": "bf16_compress", "config": {}})
    with pytest.raises(HookConfigError, match="doubled is made of reductions"):
        Doubled(lambda state, bucket: None)  # type: ignore[arg-type]


def test_whether_the_last_collective_delivers_is_not_inherited_with_other_code() -> None:
    class Renamed(Plain):
        name = "renamed"

    class More(Plain):
        def run(self, bucket: Bucket, ctx: StepContext) -> Iterator[Any]:
            yield from super().run(bucket, ctx)
            bucket.buffer = bucket.buffer * 2

    class MoreCast(WireCast):
        run = Doubled.run

    assert [r.delivers for r in (Plain(), Renamed(), WireCast(Plain(), "bf16"))] == [True] * 3
    others = [More(), WireCast(More(), "bf16"), WireCast(Plain(), "bf16", accumulate="fp32"), MoreCast(Plain(), "bf16")]
    assert not any(r.delivers for r in [*others, Doubled(Plain()), warmup(Plain(), steps=1)])
