"""Averages of buffers keep equal numbers to the bit."""

import pytest
import torch
from torch import nn

from ch_core import SimulatedRank, simulate
from ch_outer import FixedRanks, OuterOptimizer, Schedule
from ch_outer.buffers import ExactMean
from commhooks import HookConfigError, Reducer, RemoteHookError

from .outer_kit import adam, make, train

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("world_size", [2, 3, 5, 7])
def test_the_mean_of_equal_numbers_is_that_number(world_size: int, dtype: torch.dtype) -> None:
    largest, least = torch.finfo(dtype).max, torch.finfo(dtype).tiny
    edges = torch.tensor([0.0, -0.0, largest, -largest, least, float("inf"), float("-inf"), float("nan")], dtype=dtype)
    table = torch.cat([torch.linspace(-3, 3, 1001, dtype=torch.float64).sin().to(dtype), edges])

    def body(rank: SimulatedRank) -> bool:
        reducer = Reducer(ExactMean(), {"table": table}, transport=rank.transport)
        kept = table
        for _ in range(3):
            kept = reducer.average({"table": kept})["table"].clone()
        return torch.equal(kept.nan_to_num(7.0, 8.0, 9.0), table.nan_to_num(7.0, 8.0, 9.0))

    assert all(simulate(world_size, body))


@pytest.mark.parametrize("dtype", DTYPES)
def test_other_numbers_are_averaged_to_the_nearest(dtype: torch.dtype) -> None:
    def body(rank: SimulatedRank) -> torch.Tensor:
        mine = {"running_mean": torch.tensor([rank.rank / 3, 1e-3 * rank.rank, -7.0], dtype=dtype)}
        return Reducer(ExactMean(), mine, transport=rank.transport).average(mine)["running_mean"].clone()

    wide = torch.stack([torch.tensor([r / 3, 1e-3 * r, -7.0], dtype=dtype).double() for r in range(3)]).mean(0)
    for found in simulate(3, body):
        torch.testing.assert_close(found, wide.to(dtype), rtol=torch.finfo(dtype).eps, atol=0.0)


class Growing(nn.Module):
    """A model with a cache that grows with the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.net = make()
        self.register_buffer("cache", torch.zeros(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.net(x)
        return found + self.cache[: len(x), None]


@pytest.mark.parametrize("change", ["grows", "added", "first"])
def test_a_buffer_that_changes_on_one_rank_is_an_error_on_all(change: str) -> None:
    def body(rank: SimulatedRank) -> list[str]:
        model = make() if change == "first" else Growing()
        optimizer = OuterOptimizer(
            adam(model), model, Schedule(every=2), ranks=FixedRanks(transport=rank.transport, timeout=5.0)
        )
        errors = []
        for step in range(6):
            if step == 2 and rank.rank == 1:
                model.register_buffer("cache" if change == "grows" else "other", torch.zeros(32))
            try:
                train(model, optimizer, rank.rank, range(step, step + 1))
            except (HookConfigError, RemoteHookError) as error:
                errors.append(f"{step} {type(error).__name__} {error}")
        return errors

    for number, errors in enumerate(simulate(2, body)):
        assert [error[0] for error in errors] == ["3", "5"]
        assert all(("cache" if change == "grows" else "other") in error for error in errors)
        if change == "grows" or number == 1:
            assert all(" HookConfigError " in error for error in errors)
