"""The outer optimizer equals the manual loop to the bit, and works as an optimizer among others."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ch_core import SimulatedRank, simulate
from ch_outer import FixedRanks, Schedule, nesterov
from ch_outer.fragment import divide
from ch_testing import spawn
from commhooks import Plain

from .outer_kit import adam, by_options, make, same, train, values

pytestmark = pytest.mark.timeout(90)
Mean = Callable[[torch.Tensor], torch.Tensor]


def by_hand(
    rank: int,
    mean: Mean,
    steps: int,
    every: int,
    parts: list[list[str]],
    overlap: int,
    mix: float | str,
    rate: float = 0.7,
) -> list[torch.Tensor]:
    """Run (Streaming) DiLoCo as its papers write it, with torch's SGD on copies. `mean` averages a flat tensor."""
    model = make()
    inner = adam(model)
    params = dict(model.named_parameters())
    starts = {name: p.detach().clone() for name, p in params.items()}
    outer = torch.optim.SGD(list(starts.values()), lr=rate, momentum=0.9, nesterov=True)
    arriving: list[tuple[int, list[str], torch.Tensor, dict[str, torch.Tensor]]] = []

    def land(step: int) -> None:
        for _, names, flat, left in [one for one in arriving if one[0] == step]:
            for n, part in zip(names, flat.split([params[n].numel() for n in names]), strict=True):
                starts[n].grad = part.view_as(starts[n])
            outer.step()
            for n in names:
                starts[n].grad = None
                if mix == "carry":
                    params[n].add_(starts[n] - left[n])
                else:
                    params[n].copy_(torch.lerp(params[n], starts[n], 1.0 - mix))
        arriving[:] = [one for one in arriving if one[0] > step]

    for step in range(1, steps + 1):
        train(model, inner, rank, range(step - 1, step))
        with torch.no_grad():
            land(step)
            for index, names in enumerate(parts):
                if step % every == (index + 1) * every // len(parts) % every:
                    flat = torch.cat([(starts[n] - params[n]).flatten() for n in names])
                    left = {n: params[n].clone() for n in names}
                    arriving.append((step + overlap, names, mean(flat), left))
            land(step)
    return values(model)


CASES = {
    "DiLoCo": {"every": 4},
    "fragments": {"every": 4, "fragments": 3},
    "overlap": {"every": 5, "overlap": 2},
    "Streaming DiLoCo": {"every": 6, "fragments": 3, "overlap": 3, "mix": 0.5},
    "overlap as long as a round": {"every": 3, "fragments": 2, "overlap": 3, "mix": 0.25},
    "carried": {"every": 5, "overlap": 3, "mix": "carry"},
    "carried, in fragments, as long as a round": {"every": 3, "fragments": 2, "overlap": 3, "mix": "carry"},
}


def hand_options(options: dict[str, Any]) -> tuple[int, list[list[str]], int, float | str]:
    parts = divide(dict(make().named_parameters()), options.get("fragments", 1))
    return options["every"], parts, options.get("overlap", 0), options.get("mix", 0.0)


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("case", CASES)
def test_it_is_the_loop_written_by_hand_over_simulated_ranks(case: str, world: int) -> None:
    def ours(rank: SimulatedRank) -> list[torch.Tensor]:
        model = make()
        optimizer = by_options(
            adam(model),
            model,
            ranks=FixedRanks(transport=rank.transport),
            exchange=Plain(),
            outer=nesterov(),
            **CASES[case],
        )
        train(model, optimizer, rank.rank, range(17))
        return values(model)

    def hand(rank: SimulatedRank) -> list[torch.Tensor]:
        def mean(flat: torch.Tensor) -> torch.Tensor:
            flat.mul_(1 / world)
            rank.transport.all_reduce(flat, "sum").wait(30.0)
            return flat

        return by_hand(rank.rank, mean, 17, *hand_options(CASES[case]))

    for found, wanted in zip(simulate(world, ours), simulate(world, hand), strict=True):
        assert same(found, wanted)


def over_gloo(rank: int, world: int) -> list[str]:
    def mean(flat: torch.Tensor) -> torch.Tensor:
        flat.mul_(1 / world)
        dist.all_reduce(flat)
        return flat

    wrong = []
    for case, options in CASES.items():
        model = make()
        optimizer = by_options(
            adam(model), model, ranks=FixedRanks(timeout=20.0), exchange="allreduce", outer=nesterov(), **options
        )
        train(model, optimizer, rank, range(17))
        if not same(values(model), by_hand(rank, mean, 17, *hand_options(options))):
            wrong.append(case)
    return wrong


@pytest.mark.gloo
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.full)])
def test_it_is_the_loop_written_by_hand_over_gloo(world: int) -> None:
    assert spawn(over_gloo, world, timeout=80) == [[]] * world


def test_the_fragments_take_turns() -> None:
    assert Schedule(10, 4).due(10) == [3]
    assert [f for count in range(1, 11) for f in Schedule(10, 4).due(count)] == [0, 1, 2, 3]
