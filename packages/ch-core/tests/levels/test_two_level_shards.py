"""Two levels on gradients that ranks share out: each rank's part of the average, on nodes in several orders."""

from collections.abc import Sequence

import pytest
import torch

import commhooks
from commhooks.adapters import Scattered
from commhooks.bucket import BucketLayout
from commhooks.errors import HookNotSupportedError
from commhooks.shards import ShardLayout
from commhooks.simulate import SimulatedRank, simulate
from commhooks.topology import Nodes

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
