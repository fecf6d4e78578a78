"""Rounds that average moves by what each rank has seen."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ch_core import SimulatedRank, simulate
from ch_outer import FixedRanks, OuterOptimizer, Schedule, plain_sgd
from ch_testing import spawn
from commhooks import (
    AllReduce,
    Bucket,
    HookConfigError,
    HookNotSupportedError,
    RankMismatchError,
    Reduction,
    StepContext,
)

from .outer_kit import batch, by_options, make, same, values

pytestmark = pytest.mark.timeout(90)

TOKENS = [
    [3.0, 5.0, 0.0, 2.0, 1.0, 1.0, 4.0],
    [100.0, 0.0, 7.0, 1.0, 9.0, 2.0, 2.0],
    [1000.0, 0.0, 6.0, 4.0],
]  # of each rank in each inner step


def outer(model: nn.Module, rank: SimulatedRank, **options: Any) -> OuterOptimizer:
    given = {"every": 2, "outer": plain_sgd(1.0), "weighted": True, "ranks": FixedRanks(transport=rank.transport)}
    return by_options(torch.optim.SGD(model.parameters(), lr=0.1), model, **{**given, **options})


def train(model: nn.Module, optimizer: OuterOptimizer, rank: int, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        x, y = batch(rank, step)
        (model(x) - y).square().mean().backward()
        optimizer.weigh(torch.tensor(TOKENS[rank][step]) if step % 2 else TOKENS[rank][step])
        optimizer.step()


def test_a_round_weighs_the_sum_of_its_inner_steps() -> None:
    def body(rank: SimulatedRank) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        model, own = make(), make()
        train(model, outer(model, rank), rank.rank, range(2))
        inner = torch.optim.SGD(own.parameters(), lr=0.1)
        for step in range(2):
            inner.zero_grad()
            x, y = batch(rank.rank, step)
            (own(x) - y).square().mean().backward()
            inner.step()
        return values(model), values(own)

    (first, mine), (second, theirs) = simulate(2, body)
    assert same(first, second)
    for found, a, b in zip(first, mine, theirs, strict=True):
        torch.testing.assert_close(found, (8.0 * a + 100.0 * b) / 108.0, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("overlap", [0, 2])
def test_thawed_parameters_weigh_all_inner_steps_up_to_their_first_exchange(overlap: int) -> None:
    """They are exchanged when the round lands, which is after the steps of its overlap."""

    def body(rank: SimulatedRank) -> list[float]:
        model = nn.ParameterDict({name: nn.Parameter(torch.zeros(2)) for name in "ab"})
        model["b"].requires_grad_(False)
        optimizer = outer(model, rank, every=4, overlap=overlap)
        for step in range(4 + overlap):
            model["b"].requires_grad_(step > 0)
            for param in model.values():
                param.grad = torch.full_like(param, -10.0 * rank.rank) if param.requires_grad else None
            optimizer.weigh(100.0 if rank.rank and step >= 4 else 1.0)
            optimizer.step()
        found: list[float] = model["b"].tolist()
        return found

    mine, theirs = 4.0 + overlap, 4.0 + 100.0 * overlap
    moved = 3.0 + overlap
    assert simulate(2, body) == [pytest.approx([moved * theirs / (mine + theirs)] * 2, rel=1e-6)] * 2


@pytest.mark.parametrize(
    "options", [{}, {"every": 4, "fragments": 2, "overlap": 1, "exchange": "quant8(error_feedback=True)"}]
)
@pytest.mark.parametrize("stop", [3, 4])
def test_it_resumes_to_the_bit_within_a_round(options: dict[str, Any], stop: int) -> None:
    def body(rank: SimulatedRank) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        model = make()
        optimizer = outer(model, rank, **options)
        train(model, optimizer, rank.rank, range(stop))
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        train(model, optimizer, rank.rank, range(stop, 7))
        again = make()
        resumed = outer(again, rank, **options)
        again.load_state_dict(saved[0])
        resumed.load_state_dict(saved[1])
        train(again, resumed, rank.rank, range(stop, 7))
        return values(model), values(again)

    for through, resumed in simulate(2, body):
        assert same(through, resumed)


def test_a_round_that_is_dropped_after_a_resume_keeps_its_weight() -> None:
    def body(rank: SimulatedRank) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        def drop_and_train(model: nn.Module, optimizer: OuterOptimizer) -> list[torch.Tensor]:
            optimizer._shared.fragments[0].drop()  # as after the loss of a group
            train(model, optimizer, rank.rank, range(3, 7))
            optimizer.finish()
            return values(model)

        model, again = make(), make()
        optimizer = outer(model, rank, every=3, overlap=2)
        train(model, optimizer, rank.rank, range(3))
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        resumed = outer(again, rank, every=3, overlap=2)
        again.load_state_dict(saved[0])
        resumed.load_state_dict(saved[1])
        return drop_and_train(model, optimizer), drop_and_train(again, resumed)

    for through, resumed in simulate(2, body):
        assert same(through, resumed)


class Once(Reduction):
    """Averages exactly, but raises in its first round on one rank."""

    name = "once"

    def __init__(self) -> None:
        self.fails = True

    def run(self, bucket: Bucket, ctx: StepContext) -> Any:
        if not bucket.storage.is_meta:
            fails, self.fails = self.fails, False
            if fails and ctx.rank == 1:
                raise ArithmeticError("a cosmic ray")
        yield AllReduce(bucket.buffer)


def test_a_lost_round_keeps_its_weight_for_the_next() -> None:
    def broken(rank: SimulatedRank) -> list[torch.Tensor]:
        model = make()
        optimizer = outer(model, rank, exchange=Once())
        with pytest.raises(Exception, match="cosmic ray"):
            train(model, optimizer, rank.rank, range(2))
        train(model, optimizer, rank.rank, range(2, 4))
        return values(model)

    lost = simulate(2, broken)

    def long(rank: SimulatedRank) -> list[torch.Tensor]:
        model = make()
        train(model, outer(model, rank, every=4), rank.rank, range(4))
        return values(model)

    assert same(*lost)
    for found, wanted in zip(lost[0], simulate(2, long)[0], strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


def joined(rank: int, world: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Ranks 0 and 1 have made a round, rank 2 has made a step alone. Then all three make a round.

    Returns:
        The parameters after the round, and those that this rank's own steps lead to.
    """
    pair, alone, every = dist.new_group([0, 1]), dist.new_group([2]), dist.new_group([0, 1, 2])
    model = make(rank // 2)
    given = {"every": 2, "outer": plain_sgd(1.0), "weighted": True, "ranks": FixedRanks(alone if rank == 2 else pair)}
    optimizer = by_options(torch.optim.SGD(model.parameters(), lr=0.1), model, **given)
    train(model, optimizer, rank, range(1 if rank == 2 else 2))
    optimizer.move(every)
    own = copy.deepcopy(model)
    train(model, optimizer, rank, range(2, 4))
    inner = torch.optim.SGD(own.parameters(), lr=0.1)
    for step in range(2, 4):
        inner.zero_grad()
        x, y = batch(rank, step)
        (own(x) - y).square().mean().backward()
        inner.step()
    return values(model), values(own)


@pytest.mark.gloo
def test_ranks_of_a_new_group_weigh_what_they_have_seen_since_the_start() -> None:
    ranks = spawn(joined, 3, timeout=80)
    assert same(ranks[0][0], ranks[1][0]) and same(ranks[0][0], ranks[2][0])
    for found, *own in zip(ranks[0][0], *(mine for _, mine in ranks), strict=True):
        wanted = sum(n * one for n, one in zip((2.0, 8.0, 10.0), own, strict=True)) / 20.0
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


def test_ranks_must_agree_and_weigh() -> None:
    def differ(rank: SimulatedRank) -> str:
        with pytest.raises(RankMismatchError) as raised:
            outer(make(), rank, weighted=rank.rank == 0)
        return str(raised.value)

    assert all("weighted" in text for text in simulate(2, differ))

    def forget(rank: SimulatedRank) -> str:
        model = make()
        optimizer = outer(model, rank, every=1)
        if rank.rank == 0:
            optimizer.weigh(1)
        with pytest.raises(HookConfigError) as raised:
            optimizer.step()
        return str(raised.value)

    assert all("rank 1 has not called" in text for text in simulate(2, forget))

    def refused(rank: SimulatedRank) -> None:
        with pytest.raises(HookNotSupportedError, match="weighted=True"):
            outer(make(), rank, weighted=False).weigh(1)
        with pytest.raises(HookConfigError, match="one number"):
            outer(make(), rank).weigh(torch.ones(2))

    simulate(1, refused)


def test_stats_add_up_without_the_skew() -> None:
    def body(rank: SimulatedRank) -> dict[str, float]:
        model = nn.Sequential(make(), nn.BatchNorm1d(2))  # buffers have a reducer without weights
        optimizer = OuterOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1),
            model,
            Schedule(every=2),
            ranks=FixedRanks(transport=rank.transport),
            weighted=True,
        )
        train(model, optimizer, rank.rank, range(2))
        return optimizer.stats()

    assert [round(found["weight_skew"], 6) for found in simulate(2, body)] == [round(200 / 108, 6)] * 2
