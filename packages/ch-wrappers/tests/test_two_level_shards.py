"""Two levels on sharded models: each rank's part of the average, and gathers of weights, on nodes in several orders."""

from collections.abc import Sequence

import pytest
import torch

import commhooks
from ch_core import Gathered, GatherEngine, Scattered, SimulatedRank, simulate
from ch_core.topology import Nodes
from commhooks import BucketLayout, HookNotSupportedError, ShardLayout

SHAPES = {"w": (37, 24), "b": (5,), "v": (64, 16)}
ERRORS = {"allreduce": 1e-6, "bf16_compress": 1e-2, "quant8": 2e-2, "quant4": 0.25}


def parts_of(
    expr: str, nodes: Nodes, world: int, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the parts that the ranks got and those of the exact average, ``(world, n)``, and check every rank's traffic."""
    cut = ShardLayout.of(BucketLayout.of_shapes(SHAPES, dtype), world)
    n = cut.part.numel
    made = torch.Generator().manual_seed(0)
    given = [torch.zeros(world, n, dtype=dtype) for _ in range(world)]
    for one in given:
        for p in cut.part.params:  # zeros in the padding
            whole = torch.randn(cut.whole_param(p.name).numel, generator=made)
            for r, piece in enumerate(whole.split(p.numel)):
                one[r, p.offset : p.offset + piece.numel()] = piece.to(dtype)
    wanted = torch.stack([one.double() for one in given]).mean(0)

    def body(rank: SimulatedRank) -> torch.Tensor:
        reduction = commhooks.create(f"two_level({expr}, nodes={nodes})").reduction
        assert reduction is not None
        scattered = Scattered(reduction)
        engine = rank.engine(scattered)
        for _ in range(2):
            output = torch.full((n,), 7.0, dtype=dtype)
            engine.run(scattered.bucket(cut, given[rank.rank].clone().view(-1), output))
            assert engine.finish() is None
        return output.double()

    return torch.stack(simulate(world, body)), wanted


@pytest.mark.parametrize(("nodes", "world"), [(2, 4), ([[3, 0], [1, 2]], 4), (3, 6), (4, 4), (1, 3)])
@pytest.mark.parametrize("expr", ERRORS)
def test_each_rank_gets_its_part(expr: str, nodes: int | Sequence[Sequence[int]], world: int) -> None:
    found, wanted = parts_of(expr, nodes, world)
    assert float((found - wanted).norm() / wanted.norm()) < ERRORS[expr]


def test_bf16_gradients_are_added_in_fp32() -> None:
    found, wanted = parts_of("allreduce", 2, 4, torch.bfloat16)
    assert float((found - wanted).norm() / wanted.norm()) < 4e-3


@pytest.mark.parametrize("expr", ["quant4(error_feedback=True)", "powersgd"])
def test_a_residual_between_nodes_is_refused(expr: str) -> None:
    reduction = commhooks.create(f"two_level({expr})").reduction
    assert reduction is not None
    with pytest.raises(HookNotSupportedError, match="run_scatter"):
        Scattered(reduction)


EXACT = {"b": "1-D"}


def gathered(
    expr: str, world: int, dtype: torch.dtype = torch.float32
) -> tuple[list[torch.Tensor], torch.Tensor, float]:
    """Gather two shards of every parameter twice.

    Returns:
        The weights of each rank, ``(world, n)``, the exact weights, and the bytes between nodes of all ranks in one gather.
    """
    cut = ShardLayout.of(BucketLayout.of_shapes(SHAPES, dtype), world)
    n = cut.part.numel
    exact = torch.randn(world, n, generator=torch.Generator().manual_seed(1)).to(dtype)

    def body(rank: SimulatedRank) -> tuple[torch.Tensor, float]:
        reduction = commhooks.create(expr).reduction
        assert reduction is not None
        engine = GatherEngine(Gathered(reduction, EXACT), rank.transport, timeout=None)
        for _ in range(2):
            storage = torch.full((world, n), float("nan"), dtype=dtype)
            storage[rank.rank] = exact[rank.rank]
            before = engine.counters.traffic.between_bytes
            engine.complete(engine.launch(engine.reduction.gather_bucket(cut, storage.view(-1))))
            sent = engine.counters.traffic.between_bytes - before
            assert engine.finish() is None
        return storage, sent

    found = simulate(world, body)
    return [storage for storage, _ in found], exact, sum(sent for _, sent in found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("nodes", "world"), [(2, 4), ([[3, 0], [1, 2]], 4), (2, 6), (3, 6), (4, 4), (1, 3)])
@pytest.mark.parametrize("expr", ["allreduce", "quant8(block=16)", "quant8(block=16), inside=quant8(block=16)"])
def test_every_rank_gathers_the_same_weights(expr: str, nodes: Nodes, world: int, dtype: torch.dtype) -> None:
    every, exact, _ = gathered(f"two_level({expr}, nodes={nodes})", world, dtype)
    assert all(torch.equal(one, every[0]) for one in every)
    off = float((every[0].double() - exact.double()).norm() / exact.double().norm())
    one_node = nodes == world and "inside" not in expr
    assert off == 0 if expr == "allreduce" or one_node else 0 < off < 1.5e-2
    [place] = [p for p in ShardLayout.of(BucketLayout.of_shapes(SHAPES, dtype), world).part.params if p.name == "b"]
    held = slice(place.offset, place.offset + place.numel)
    assert torch.equal(every[0][:, held], exact[:, held]), "exact by default"


@pytest.mark.parametrize(("ranks", "world"), [(2, 4), (2, 6), (4, 8)])
def test_a_shard_enters_each_node_once(ranks: int, world: int) -> None:
    """The bytes of a shard's codes, counted at the ranks that send them."""
    _, _, between = gathered(f"two_level(quant8(block=16), nodes={ranks})", world)
    part = ShardLayout.of(BucketLayout.of_shapes(SHAPES), world).part
    code = sum(4 * p.numel if p.name in EXACT else 18 * -(-p.numel // 16) for p in part.params)
    assert between == (world // ranks - 1) * world * code


def test_a_residual_of_gathered_weights_is_refused() -> None:
    with pytest.raises(HookNotSupportedError, match="cannot gather weights"):
        Gathered(commhooks.create("two_level(quant4(error_feedback=True))").reduction)
