"""Gathers and scatters of parameters of which some travel exactly, over simulated ranks."""

from collections.abc import Iterator

import pytest
import torch

import commhooks
from ch_core import (
    Bucket,
    BucketLayout,
    Engine,
    Gathered,
    GatherEngine,
    ParamLayout,
    Reduction,
    Requests,
    Scattered,
    ShardLayout,
    Shards,
    SimulatedRank,
    StepContext,
    simulate,
)
from ch_core.shards import plain_scatter

SHAPES = dict.fromkeys(("symbol", "down", "head", "up"), (64, 32))
"""Exact and coded parameters take turns, so that both kinds have gaps between them, and all have one size."""


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize(
    "expr",
    [
        "bf16_compress",
        "fp16_compress",
        "policy({'*': bf16_compress})",
        "two_level(bf16_compress, nodes=[[0], [1], [2]])",
    ],
)
def test_exact_and_cast_parameters_of_one_size_keep_their_own_weights(expr: str, world: int) -> None:
    if "nodes" in expr and world == 2:
        expr = "two_level(bf16_compress, nodes=[[0], [1]])"
    cut = ShardLayout.of(BucketLayout.of_shapes(SHAPES), world)
    exact = torch.randn(world, cut.part.numel, generator=torch.Generator().manual_seed(1))

    def body(rank: SimulatedRank) -> torch.Tensor:
        reduction = commhooks.create(expr).reduction
        assert reduction is not None
        engine = GatherEngine(
            Gathered(reduction, {"symbol": "embedding", "head": "tied"}), rank.transport, timeout=None
        )
        storage = torch.full((world, cut.part.numel), float("nan"))
        storage[rank.rank] = exact[rank.rank]
        engine.complete(engine.launch(engine.reduction.gather_bucket(cut, storage.view(-1))))
        assert engine.finish() is None
        return storage

    first, *others = simulate(world, body)
    assert all(torch.equal(one, first) for one in others)
    for p in cut.part.params:
        found, wanted = (every[:, p.offset : p.offset + p.numel] for every in (first, exact))
        if p.name in ("symbol", "head"):
            assert torch.equal(found, wanted), p.name
        else:
            assert 0 < float((found - wanted).norm() / wanted.norm()) < 1e-2, p.name


class Halves(Reduction):
    """Averages every other parameter by the function that also averages the exact ones."""

    name, lossy = "halves", True

    def run(self, bucket: Bucket, ctx: StepContext) -> Iterator[Requests]:
        raise NotImplementedError

    def route(self, param: ParamLayout, step: int) -> str | None:
        return "exact" if param.name in ("symbol", "head") else None

    def run_scatter(self, shards: Shards, ctx: StepContext) -> Iterator[Requests]:
        yield from plain_scatter(shards, ctx.scratch)


def test_exact_and_other_gradients_of_one_size_keep_their_own_averages() -> None:
    world = 2
    cut = ShardLayout.of(BucketLayout.of_shapes(SHAPES), world)
    given = torch.randn(world, world * cut.part.numel, generator=torch.Generator().manual_seed(1))

    def body(rank: SimulatedRank) -> torch.Tensor:
        reduction = Scattered(Halves())
        engine, output = Engine(reduction, rank.transport, timeout=None), torch.zeros(cut.part.numel)
        engine.run(reduction.bucket(cut, given[rank.rank].clone(), output))
        assert engine.finish() is None
        return output

    for rank, found in enumerate(simulate(world, body)):
        assert torch.allclose(found, given.mean(0).view(world, -1)[rank])
