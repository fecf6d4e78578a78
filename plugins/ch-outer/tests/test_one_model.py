"""The model that ranks share: its names, precision and buffers, and the effects of evaluating or saving it."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.two_tensor import TwoTensor

from ch_core import SimulatedRank, checksum, simulate
from ch_outer import FixedRanks, OuterOptimizer, Schedule, plain_sgd
from ch_outer.parameters import buffers_of, parameters_of
from ch_testing import spawn
from commhooks import Plain, RankMismatchError, StateError

from .outer_kit import adam, alone, by_options, make, same, train, values

pytestmark = pytest.mark.timeout(90)


def evaluated(rank: int, world: int) -> tuple[list[float], list[float], list[float]]:
    """Return the losses of training with and without evaluations, and those of the shared model, between its parameters
    and alone.
    """

    def run(evaluate: bool) -> tuple[list[float], list[float]]:
        mesh = init_device_mesh(torch.get_default_device().type, (1, world), mesh_dim_names=("between", "inside"))
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3))
        fully_shard(model, mesh=mesh["inside"])
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = OuterOptimizer(
            inner, model, Schedule(every=4), ranks=FixedRanks(process_group=mesh["between"].get_group())
        )
        losses, seen = [], []
        x = torch.ones(4, 6)

        def look() -> float:
            with torch.no_grad():
                return model(x).square().mean().item()

        for step in range(6):
            if evaluate and step in (2, 5):
                own = look()  # the root stays gathered afterwards
                with optimizer.global_parameters():
                    seen.append(look())
                assert look() == own != seen[-1]
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        if evaluate:
            look()
            optimizer.finish()
            seen.append(look())
        return losses, seen

    plain, _ = run(False)
    losses, seen = run(True)
    return plain, losses, seen


@pytest.mark.gloo
def test_evaluating_under_fsdp2_sees_the_shared_model_and_leaves_the_training_alone() -> None:
    (plain, losses, seen), other = spawn(evaluated, 2, timeout=80)
    assert (plain, losses, seen) == other
    assert losses == plain
    assert seen[0] == plain[0]  # the start before the first round
    assert seen[1] < seen[0]


@pytest.mark.parametrize("overlap", [{}, {"overlap": 1, "mix": "carry"}, {"overlap": 1, "mix": 0.5}])
def test_parameters_of_16_bits_lose_no_move_to_their_grid(overlap: dict[str, Any]) -> None:
    """Every round gains a quarter of the distance between 1 and the next bf16. These moves must add up, as in fp32."""

    def body(rank: SimulatedRank, dtype: torch.dtype) -> float:
        model = nn.Linear(1, 1, bias=False).to(dtype)
        nn.init.ones_(model.weight)
        inner = torch.optim.SGD(model.parameters(), lr=2**-7)
        options: dict[str, Any] = {"every": 1, "exchange": Plain(), "outer": plain_sgd(1.0), **overlap}
        optimizer = by_options(inner, model, ranks=FixedRanks(transport=rank.transport), **options)

        def steps(optimizer: OuterOptimizer, param: torch.Tensor) -> None:
            for _ in range(20):
                param.grad = torch.full_like(param, -1.0 if rank.rank == 0 else 0.0)
                optimizer.step()

        steps(optimizer, model.weight)
        again = nn.Linear(1, 1, bias=False).to(dtype)  # resumed in the middle
        nn.init.ones_(again.weight)
        resumed = by_options(
            torch.optim.SGD(again.parameters(), lr=2**-7), again, ranks=FixedRanks(transport=rank.transport), **options
        )
        resumed.load_state_dict(optimizer.state_dict())
        again.load_state_dict(model.state_dict())
        steps(resumed, again.weight)
        return next(start.item() for f in resumed.rounds.shared.fragments for start in f.starts.values())

    wanted = simulate(4, lambda rank: body(rank, torch.float32))[0]
    found = simulate(4, lambda rank: body(rank, torch.bfloat16))[0]
    assert wanted > 1.03
    assert found == pytest.approx(wanted, abs=2**-9)


@pytest.mark.parametrize("how", ["load", "convert"])
def test_a_model_that_is_converted_to_fp32_leaves_its_rounding_behind(how: str) -> None:
    """With zero gradients the start stops moving."""

    def body(rank: SimulatedRank) -> bool:
        def make(dtype: torch.dtype) -> tuple[nn.Module, OuterOptimizer]:
            model = nn.Linear(16, 16, bias=False)
            model.weight.data = (torch.arange(16.0) + 1.0).repeat(16, 1).to(dtype)
            inner = torch.optim.SGD(model.parameters(), lr=2**-7)
            outer = plain_sgd(1.0)
            return model, OuterOptimizer(
                inner,
                model,
                Schedule(every=1),
                exchange=Plain(),
                outer=outer,
                ranks=FixedRanks(transport=rank.transport),
            )

        def steps(model: nn.Module, optimizer: OuterOptimizer, scale: float) -> torch.Tensor:
            for _ in range(4):
                model.weight.grad = torch.full_like(model.weight, scale * (1 + rank.rank))
                optimizer.step()
            return next(iter(optimizer.rounds.shared.fragments[0].starts.values())).clone()

        model, optimizer = make(torch.bfloat16)
        steps(model, optimizer, 0.3)
        if how == "load":
            other, resumed = make(torch.float32)
            resumed.load_state_dict(optimizer.state_dict())
            other.load_state_dict(model.state_dict())
            model, optimizer = other, resumed
        else:
            model.float()
        return torch.equal(steps(model, optimizer, 0.0), steps(model, optimizer, 0.0))

    assert simulate(2, body) == [True, True]


class Wrapper(nn.Linear):
    """Wraps a module, adds weights, and names it by a name that DDP uses, too."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.module = nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(1))
        self.module.register_buffer("seen", torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = super().forward(self.module(x))
        return found


def test_only_a_wrapper_s_name_is_taken_from_the_parameters_names() -> None:
    names = ["weight", "bias", "module.weight", "module.bias"]
    assert list(parameters_of(Wrapper())[0]) == names
    assert list(buffers_of(Wrapper())) == ["seen", "module.seen"]
    assert list(parameters_of(torch.compile(Wrapper()))[0]) == names
    assert parameters_of(nn.ReLU()) == ({}, {})
    around = nn.Module()
    around.module = nn.Linear(2, 2)
    around.register_buffer("mean", torch.zeros(1))
    assert list(buffers_of(around)) == ["mean"]

    def body(rank: SimulatedRank) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = Wrapper()
        optimizer = OuterOptimizer(
            adam(model), model, Schedule(every=2), exchange=Plain(), ranks=FixedRanks(transport=rank.transport)
        )
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.full((2, 4), 1.0 + rank.rank)).square().sum().backward()
            optimizer.step()
        return values(model)

    assert same(*simulate(2, body))


def test_the_shared_model_has_the_shared_buffers() -> None:
    def body(rank: SimulatedRank) -> list[list[torch.Tensor]]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        optimizer = OuterOptimizer(
            adam(model), model, Schedule(every=2), exchange=Plain(), ranks=FixedRanks(transport=rank.transport)
        )
        train(model, optimizer, rank.rank, range(2))
        at_once = [b.clone() for b in buffers_of(model).values()]
        train(model, optimizer, rank.rank, range(2, 3))
        own = [b.clone() for b in buffers_of(model).values()]
        with optimizer.global_parameters():
            shared = [b.clone() for b in buffers_of(model).values()]
        assert same(own, list(buffers_of(model).values()))
        saved = optimizer.state_dict()
        train(model, optimizer, rank.rank, range(3, 4))
        optimizer.load_state_dict(saved)
        with optimizer.global_parameters():
            assert same(shared, list(buffers_of(model).values()))
        return [at_once, shared, own]

    here, there = simulate(2, body)
    assert same(here[0], here[1])
    assert same(here[1], there[1])
    assert not same(here[2], there[2])


def test_frozen_parameters_are_compared() -> None:
    def body(rank: SimulatedRank, seed: int) -> None:
        model = make()
        with torch.no_grad():
            model[0].weight.fill_(float(seed)).requires_grad_(False)
        OuterOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1),
            model,
            Schedule(every=2),
            exchange=Plain(),
            ranks=FixedRanks(transport=rank.transport),
        )

    simulate(2, lambda rank: body(rank, 0))
    with pytest.raises(RankMismatchError, match="frozen parameters"):
        simulate(2, lambda rank: body(rank, rank.rank))


def test_buffers_that_are_averaged_are_equal_at_the_start() -> None:
    def body(rank: SimulatedRank, buffers: str) -> None:
        model = make()
        model.register_buffer("seen", torch.full((1,), float(rank.rank)))
        OuterOptimizer(
            adam(model),
            model,
            Schedule(every=2),
            exchange=Plain(),
            buffers=buffers,
            ranks=FixedRanks(transport=rank.transport),
        )

    simulate(2, lambda rank: body(rank, "local"))
    with pytest.raises(RankMismatchError, match="buffers at the start"):
        simulate(2, lambda rank: body(rank, "average"))


def test_frozen_weights_of_a_wrapper_subclass_are_compared_by_their_inner_tensors() -> None:
    """Quantized models have such weights. They own no memory whose bytes a digest could read."""
    inside = torch.ones(4)
    assert checksum(TwoTensor(inside, inside)) == checksum(TwoTensor(inside.clone(), inside.clone()))
    assert checksum(TwoTensor(inside, inside)) != checksum(TwoTensor(inside, inside + 1))
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    weight = model[0].weight.detach()
    model[0].weight = nn.Parameter(TwoTensor(weight, weight), requires_grad=False)
    optimizer = OuterOptimizer(
        adam(model), model, Schedule(every=2), exchange=Plain(), ranks=FixedRanks(transport=alone())
    )
    assert optimizer.count == 0


def test_a_state_of_another_inner_optimizer_is_refused_and_changes_nothing() -> None:
    def of(model: nn.Module, groups: int) -> OuterOptimizer:
        params: Any = [{"params": [p]} for p in model.parameters()] if groups > 1 else model.parameters()
        inner = torch.optim.SGD(params, lr=0.1)
        return OuterOptimizer(inner, model, Schedule(every=2), exchange=Plain(), ranks=FixedRanks(transport=alone()))

    model = make()
    optimizer, other = of(model, 2), of(make(), 1)
    train(model, optimizer, 0, range(4))
    before = [start.clone() for f in other.rounds.shared.fragments for start in f.starts.values()]
    with pytest.raises(StateError, match="inner optimizer"):
        other.load_state_dict(optimizer.state_dict())
    assert same(before, [start for f in other.rounds.shared.fragments for start in f.starts.values()])
