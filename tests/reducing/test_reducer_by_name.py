"""Every installed reduction averages plain tensors as it averages gradients."""

import pytest
import torch

import commhooks
from ch_core import SimulatedRank, simulate
from ch_testing import SimulatedRanks
from commhooks import Reducer

pytestmark = pytest.mark.timeout(60)
EXPRESSIONS = sorted(
    {spec.example or spec.name for spec in commhooks.list_hooks(kind="reduction")}
    | {"bf16_wrapper(powersgd(rank=2))", "error_feedback(bf16_compress)", 'policy({"b": allreduce, "*": quant8})'}
)


def given(rank: int, turn: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(10 * turn + rank)
    return {"w": torch.randn(72, 40, generator=generator), "b": torch.randn(40, generator=generator)}


@pytest.mark.parametrize("expr", EXPRESSIONS)
def test_a_reducer_equals_the_hook_in_a_backward(expr: str) -> None:
    def with_reducer(rank: SimulatedRank) -> list[dict[str, torch.Tensor]]:
        reducer, found = Reducer(expr, given(0, 0), transport=rank.transport), []
        for turn in range(3):
            exchange = reducer.start(given(rank.rank, turn))
            exchange.advance()
            found.append({name: mean.clone() for name, mean in exchange.wait().items()})
        assert reducer.state_dict()["step"] == 3
        return found

    def backwards(rank: int, turn: int) -> dict[str, torch.Tensor]:  # DDP also takes the last parameter first
        return dict(reversed(given(rank, turn).items()))

    hooks = SimulatedRanks(lambda: commhooks.create(expr), 2, backwards(0, 0), buckets=1)
    steps = [hooks.step([backwards(rank, turn) for rank in range(2)]).gradients for turn in range(3)]
    for rank, found in enumerate(simulate(2, with_reducer)):
        for turn, means in enumerate(found):
            for name, mean in means.items():
                assert torch.equal(mean, steps[turn][rank][name]), (turn, name)
