"""An outer optimizer over ranks that are far apart, in real processes."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from ch_outer import FixedRanks, OuterOptimizer, Schedule
from ch_testing import spawn
from commhooks import RankMismatchError

from .outer_kit import adam, make, train, values

pytestmark = [pytest.mark.gloo, pytest.mark.cpu("link= is for CPUs over gloo")]


def outer(model: torch.nn.Module, link: str | None, exchange: str) -> OuterOptimizer:
    schedule = Schedule(every=4, fragments=2, overlap=3, mix="carry")
    return OuterOptimizer(adam(model), model, schedule, exchange=exchange, ranks=FixedRanks(link=link))


def far_and_near(rank: int, world: int, exchange: str) -> list[list[torch.Tensor]]:
    found = []
    for link in ("far", None):
        model = make()
        optimizer = outer(model, link, exchange)
        train(model, optimizer, rank, range(11))
        optimizer.finish()
        found.append(values(model))
    return found


@pytest.mark.parametrize(
    "exchange", ["quant4(exempt=False)", pytest.param("powersgd(rank=1, start_iter=0)", marks=pytest.mark.full)]
)
def test_far_ranks_hold_one_model_and_two_of_them_the_bits_of_near_ones(exchange: str) -> None:
    (far, near), peer = spawn(far_and_near, 2, exchange, timeout=100)
    for one, other in zip([far, far, near], [peer[0], near, peer[1]], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def other_link(rank: int, world: int) -> str:
    model = make()
    with pytest.raises(RankMismatchError) as raised:
        outer(model, "far" if rank else "50mbit,80ms", "quant4")
    return str(raised.value)


def test_ranks_agree_on_the_link() -> None:
    texts: list[Any] = spawn(other_link, 2, timeout=100)
    assert all("link" in text for text in texts), texts


def thawed_after_a_move(rank: int, world: int) -> list[torch.Tensor]:
    """Two ranks and a third one train apart, then together."""
    pair, every = dist.new_group([0, 1]), dist.new_group([0, 1, 2])
    alone = dist.new_group([2])
    model = make()
    model[4].weight.requires_grad_(False)
    optimizer = OuterOptimizer(
        adam(model), model, Schedule(every=2), ranks=FixedRanks(pair if rank < 2 else alone, link="far")
    )
    train(model, optimizer, rank, range(4))
    optimizer.move(every)
    model[4].weight.requires_grad_(True)
    train(model, optimizer, rank, range(4))
    optimizer.finish()
    return values(model)


def test_a_parameter_that_thaws_after_a_move_is_exchanged_in_the_new_group() -> None:
    first, *others = spawn(thawed_after_a_move, 3, timeout=100)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def joins_with_another_schedule(rank: int, world: int) -> str:
    alone = [dist.new_group([one]) for one in range(world)][rank]
    model = make()
    optimizer = OuterOptimizer(adam(model), model, Schedule(every=2 + rank), ranks=FixedRanks(alone))
    with pytest.raises(RankMismatchError) as raised:
        optimizer.move(dist.group.WORLD)
    return str(raised.value)


def test_a_newcomer_with_another_schedule_is_refused_on_all_ranks() -> None:
    texts: list[Any] = spawn(joins_with_another_schedule, 2, timeout=100)
    assert all("every=2" in text and "every=3" in text for text in texts), texts
