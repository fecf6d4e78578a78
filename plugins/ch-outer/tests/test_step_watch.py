"""A script that holds the inner optimizer loads, writes, copies and pickles its model as without an outer optimizer."""

import copy
import io
import pickle
import pickletools
from typing import Any

import pytest
import torch
from torch import nn

from ch_core import SimulatedRank, simulate
from ch_outer import FixedRanks, OuterOptimizer, plain_sgd
from commhooks import RankMismatchError

from .outer_kit import adam, by_options, make, same, train, values

pytestmark = pytest.mark.timeout(90)


def followed(rank: SimulatedRank, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer, OuterOptimizer]:
    model = make()
    inner = adam(model)
    ranks = FixedRanks(transport=rank.transport)
    outer = by_options(inner, model, exchange="allreduce", outer=plain_sgd(1.0), ranks=ranks, **options)
    outer.follow()
    return model, inner, outer


def constant(model: nn.Module, value: float) -> dict[str, torch.Tensor]:
    return {name: torch.full_like(p, value) for name, p in model.state_dict().items()}


@pytest.mark.parametrize(("every", "overlap"), [(4, 0), (4, 2)], ids=["in a round", "while an exchange is under way"])
def test_a_load_moves_the_start_and_is_no_move(every: int, overlap: int) -> None:
    """From the load on the ranks train as if they had begun there."""

    def loads(rank: SimulatedRank) -> list[torch.Tensor]:
        model, inner, outer = followed(rank, every=every, overlap=overlap)
        train(model, inner, rank.rank, range(5))
        assert outer.under_way == bool(overlap)
        model.load_state_dict(constant(model, 0.25))
        assert outer.common and outer.under_way == 0
        inner.state.clear()
        train(model, inner, rank.rank, range(5, 8 + overlap))
        return values(model)

    def begins(rank: SimulatedRank) -> list[torch.Tensor]:
        model, inner, _ = followed(rank, every=3, overlap=overlap)
        model.load_state_dict(constant(model, 0.25))
        train(model, inner, rank.rank, range(5, 8 + overlap))
        return values(model)

    for one, other in zip(simulate(2, loads), simulate(2, begins), strict=True):
        assert same(one, other)


def test_a_part_can_be_loaded() -> None:
    def body(rank: SimulatedRank) -> list[torch.Tensor]:
        model, inner, _ = followed(rank, every=4)
        train(model, inner, rank.rank, range(1))
        model[0].load_state_dict(constant(model[0], 0.5))
        for group in inner.param_groups:
            group["lr"] = group["weight_decay"] = 0.0
        train(model, inner, rank.rank, range(1, 4))
        return values(model)

    one, other = simulate(2, body)
    assert same(one, other) and bool((one[0] == 0.5).all()) and not bool((one[2] == 0.5).any())


@pytest.mark.parametrize("loading", [(0,), (0, 1)], ids=["on one rank", "of other values on each rank"])
def test_ranks_that_load_other_values_are_told_in_the_next_round(loading: tuple[int, ...]) -> None:
    def body(rank: SimulatedRank) -> str:
        model, inner, _ = followed(rank, every=4)
        train(model, inner, rank.rank, range(2))
        if rank.rank in loading:
            model.load_state_dict(copy.deepcopy(model.state_dict()))  # the rank's own, inside a round
        with pytest.raises(RankMismatchError) as caught:
            train(model, inner, rank.rank, range(2, 4))
        return str(caught.value)

    for said in simulate(2, body):
        assert "different starts of this round" in said and "0.weight" in said


def test_other_writes_are_moves_of_the_round() -> None:
    def body(rank: SimulatedRank) -> list[torch.Tensor]:
        model, inner, _ = followed(rank, every=2)
        for group in inner.param_groups:
            group["lr"] = group["weight_decay"] = 0.0
        for step in range(2):
            train(model, inner, rank.rank, range(step, step + 1))
            if not step:
                with torch.no_grad():
                    for p in model.parameters():
                        p.fill_(float(rank.rank))
        return values(model)

    for found in simulate(2, body):
        assert all(torch.allclose(p, torch.full_like(p, 0.5)) for p in found)


def test_a_copied_or_pickled_model_is_an_ordinary_model() -> None:
    def body(rank: SimulatedRank) -> None:
        model, inner, outer = followed(rank, every=4)
        train(model, inner, rank.rank, range(2))
        start = next(iter(outer.rounds.shared.fragments[0].starts.values())).clone()
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False)]
        for one in [*copies, copy.deepcopy(model[0])]:
            one.load_state_dict(constant(one, 7.0))
        assert torch.equal(start, next(iter(outer.rounds.shared.fragments[0].starts.values())))
        words = {str(arg) for _, arg, _ in pickletools.genops(pickle.dumps(model[0]))}
        assert not any("ch_outer" in word for word in words)  # so it can be loaded where ch-outer is not installed

    simulate(2, body)


def test_close_ends_the_watch_of_loads() -> None:
    def body(rank: SimulatedRank) -> None:
        model = make()
        outer = by_options(
            adam(model), model, every=4, exchange="allreduce", ranks=FixedRanks(transport=rank.transport)
        )
        outer.follow()()
        before = [start.clone() for start in outer.rounds.shared.fragments[0].starts.values()]
        model.load_state_dict(constant(model, 3.0))
        assert same(before, list(outer.rounds.shared.fragments[0].starts.values()))

    simulate(2, body)
