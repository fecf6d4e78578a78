"""Rounds that end by time: unequal numbers of steps, weights by tokens, late ranks, and an end on all ranks."""

import time
from typing import Any

import pytest
import torch
from torch import nn

from ch_outer import OuterOptimizer, local_sgd, plain_sgd
from commhooks import HookConfigError, HookNotSupportedError, Plain, RemoteHookError
from commhooks.simulate import SimulatedRank, simulate

from .outer_kit import BUILDING, adam, alone, make, same, train, values

pytestmark = pytest.mark.timeout(60)


def linear() -> nn.Module:
    with BUILDING:
        torch.manual_seed(0)
        return nn.Linear(1, 1, bias=False)


def outer(rank: SimulatedRank, model: nn.Module, **options: Any) -> OuterOptimizer:
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    return OuterOptimizer(inner, model, exchange=Plain(), outer=plain_sgd(1.0), transport=rank.transport, **options)


def step(model: nn.Module, optimizer: OuterOptimizer, samples: int, move: float, seconds: float = 0.0) -> None:
    """Make one step on some samples that moves the parameter by ``move``."""
    optimizer.zero_grad()
    (model(torch.ones(samples, 1)).mean() * -move).backward()
    time.sleep(seconds)
    optimizer.step()


def test_the_average_is_weighted_by_samples() -> None:
    """Rank 0 has made one step on 1 sample, rank 1 one step on 3: their moves of 4 and 8 make (1 * 4 + 3 * 8) / 4 = 7."""

    def body(rank: SimulatedRank) -> tuple[float, list[float]]:
        model = linear()
        start = model.weight.item()
        optimizer = outer(rank, model, seconds=30.0)
        step(model, optimizer, 1 + 2 * rank.rank, 4.0 + 4.0 * rank.rank)
        optimizer.finish()
        return model.weight.item() - start, [worker["work"] for worker in optimizer.report()["workers"]]

    for moved, work in simulate(2, body):
        assert moved == pytest.approx(7.0, abs=1e-5) and work == [1.0, 3.0]


def test_tokens_of_all_ranks_end_a_round() -> None:
    """The first round gives each rank an equal part, and the later ones last as long as the measured speeds say."""

    def body(rank: SimulatedRank) -> tuple[int, dict[str, Any]]:
        with BUILDING:
            model = nn.Sequential(nn.Embedding(5, 2), nn.Linear(2, 1))
        optimizer = OuterOptimizer(
            adam(model), model, exchange=Plain(), tokens=640, transport=rank.transport, verify_ranks=False
        )
        while optimizer.landed < 4:
            model(torch.zeros(2, 16, dtype=torch.int64)).mean().backward()
            time.sleep(0.01 * (1 + rank.rank))
            optimizer.step()
        optimizer.finish()
        return optimizer.landed, optimizer.report()

    (landed, report), (other, same_report) = simulate(2, body)
    assert landed == other >= 4 and report["unit"] == "tokens"
    assert report["workers"] == same_report["workers"]
    fast, slow = report["workers"]
    assert fast["work"] + slow["work"] > 640


def test_a_late_rank_joins_the_next_round_and_holds_the_others_up_once() -> None:
    """Rank 1 makes one step of three seconds. Rounds of 0.5 s do not wait for it, but for every other one (late=1)."""

    def body(rank: SimulatedRank) -> tuple[float, float, list[dict[str, Any]], float]:
        model = linear()
        start = model.weight.item()
        optimizer = outer(rank, model, seconds=0.5, late=1)
        begun = time.monotonic()
        if rank.rank:
            step(model, optimizer, 1, 1.0, seconds=3.0)
        else:
            step(model, optimizer, 1, 1.0, seconds=0.35)
        first = time.monotonic() - begun
        if not rank.rank:
            step(model, optimizer, 1, 1.0, seconds=0.35)
        optimizer.finish()
        return first, model.weight.item() - start, optimizer.report()["workers"], optimizer.landed

    (first, moved, workers, _), (_, other, _, _) = simulate(2, body)
    assert first < 2.0  # the first round ended without rank 1
    assert moved == other == pytest.approx(1.0 + 1.0)  # alone at first; then the mean of 1 and 1
    assert [one["missed"] for one in workers] == [0, 1] and [one["steps"] for one in workers] == [2, 1]


def test_a_rank_that_has_ended_takes_part_in_the_rounds_of_the_others() -> None:
    def body(rank: SimulatedRank) -> list[torch.Tensor]:
        model = make()
        optimizer = OuterOptimizer(adam(model), model, exchange="quant8", seconds=0.05, transport=rank.transport)
        train(model, optimizer, rank.rank, range(5 + 100 * rank.rank))
        optimizer.finish()
        return values(model)

    one, other = simulate(2, body)
    assert same(one, other)


def test_an_error_of_one_rank_is_raised_on_all() -> None:
    def body(rank: SimulatedRank) -> str:
        model = make()
        optimizer = OuterOptimizer(adam(model), model, exchange=Plain(), seconds=0.05, transport=rank.transport)
        if rank.rank:
            model.register_parameter("late", nn.Parameter(torch.zeros(1)))
        try:
            for index in range(500):
                train(model, optimizer, rank.rank, range(index, index + 1))
            optimizer.finish()
        except (HookConfigError, RemoteHookError) as error:
            return str(error)
        return ""

    one, other = simulate(2, body)
    assert "rank 1" in one and "require gradients and are not exchanged" in other


def test_tokens_that_cannot_be_counted_are_an_error() -> None:
    model = make()
    optimizer = OuterOptimizer(adam(model), model, exchange=Plain(), tokens=10, transport=alone())
    model[0](torch.zeros(2, 6)).sum().backward()
    with pytest.raises(HookConfigError, match="calls only parts of it"):
        optimizer.step()


def test_options_that_do_not_fit_are_refused() -> None:
    model = make()
    for options in ({}, {"every": 3, "seconds": 1.0}, {"seconds": 1.0, "tokens": 5}, {"seconds": -1.0}):
        with pytest.raises(HookConfigError):
            OuterOptimizer(adam(model), model, transport=alone(), **options)
    for options in ({"fragments": 2}, {"overlap": 1}, {"mix": 0.5}):
        with pytest.raises(HookNotSupportedError, match=next(iter(options))):
            OuterOptimizer(adam(model), model, transport=alone(), seconds=1.0, **options)
    optimizer = local_sgd(adam(model), model, seconds=5.0, exchange=Plain(), transport=alone())
    assert optimizer.must_finish
    with pytest.raises(HookNotSupportedError, match="cannot be resumed"):
        optimizer.state_dict()


def test_ranks_compare_the_length_of_a_round() -> None:
    def body(rank: SimulatedRank) -> None:
        model = make()
        OuterOptimizer(adam(model), model, seconds=1.0 + rank.rank, transport=rank.transport)

    with pytest.raises(BaseException, match="the ranks disagree"):
        simulate(2, body)
