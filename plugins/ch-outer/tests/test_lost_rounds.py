"""Rounds that lose a part: a saved exchange, buffers, a reduction that raises."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ch_testing
from ch_core import SimulatedRank, checksum, simulate
from ch_outer import FixedRanks, Members, OuterOptimizer, Schedule, plain_sgd
from commhooks import AllReduce, Bucket, HookConfigError, Plain, Reduction, StepContext

from .outer_kit import by_options, make, same, train

pytestmark = pytest.mark.timeout(90)


@pytest.mark.parametrize("fails", [False, True])
def test_a_checkpoint_in_the_middle_of_an_exchange_counts_nothing_twice(fails: bool) -> None:
    """The exchange lands at its step, even if the buffers cannot be averaged then. Its residuals are final."""

    def body(rank: SimulatedRank) -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 8, bias=False), nn.BatchNorm1d(8))
        optimizer = OuterOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1),
            model,
            Schedule(every=4, overlap=2, mix="carry"),
            exchange="quant2(exempt=False)",
            outer=plain_sgd(1.0),
            ranks=FixedRanks(transport=rank.transport),
        )
        sent = torch.zeros_like(model[0].weight)

        def step() -> None:
            optimizer.zero_grad()
            model(torch.randn(8, 32, generator=torch.Generator().manual_seed(optimizer.count))).sin().sum().backward()
            optimizer.step()

        for _ in range(8):
            step()
        fragment = optimizer.rounds.shared.fragments[0]
        before = fragment.starts["0.weight"].clone()
        optimizer.state_dict()
        assert fragment.waiting
        mean = fragment.reducer.tensors["0.weight"].clone()
        if fails:
            average = optimizer.rounds.shared.buffers.average

            def once() -> dict[str, torch.Tensor]:
                optimizer.rounds.shared.buffers.average = average
                raise ArithmeticError("a cosmic ray")

            optimizer.rounds.shared.buffers.average = once
            step()
            with pytest.raises(ArithmeticError):
                step()
        else:
            step()
            step()
        assert optimizer.landed == 2
        torch.sub(before, fragment.starts["0.weight"], out=sent)
        assert torch.allclose(sent, mean, atol=1e-6)
        return fragment.starts["0.weight"].flatten().tolist()

    here, there = simulate(2, body)
    assert here == there


@pytest.mark.parametrize("save", [False, True])
def test_move_drops_exchanges_in_flight_and_lands_those_of_a_checkpoint(save: bool, tmp_path: Any) -> None:
    """The residuals of a saved exchange are final. If it were dropped, its content would be sent twice."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        model = nn.Linear(64, 8, bias=False)
        options: dict[str, Any] = {
            "every": 4,
            "overlap": 2,
            "exchange": "quant2(exempt=False)",
            "outer": plain_sgd(1.0),
        }
        optimizer = by_options(torch.optim.SGD(model.parameters(), lr=0.1), model, **options)
        fragment = optimizer.rounds.shared.fragments[0]

        def steps(count: int) -> None:
            for _ in range(count):
                optimizer.zero_grad()
                x = torch.randn(8, 64, generator=torch.Generator().manual_seed(optimizer.count))
                model(x).sin().sum().backward()
                optimizer.step()

        def residual() -> list[torch.Tensor]:
            fragment.reducer.commit()
            return [tensor.clone() for _, _, tensor in fragment.reducer.handle.state.entries()]

        steps(7)
        before, start = residual(), fragment.starts["weight"].clone()
        steps(1)
        if save:
            optimizer.state_dict()
            start -= fragment.reducer.tensors["weight"]
        optimizer.move(dist.group.WORLD)
        assert optimizer.landed == 1 + save
        assert torch.equal(fragment.starts["weight"], start)
        assert torch.equal(model.weight.detach(), start) is save
        assert same(residual(), before) is not save
    finally:
        dist.destroy_process_group()


def test_buffers_that_cannot_be_averaged_stop_no_exchange() -> None:
    """The optimizer uses the received averages, loses no inner step, and continues every round of the parameters."""

    def body(rank: SimulatedRank) -> tuple[list[float], int]:
        model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(model.weight)
        model.register_buffer("cache", torch.zeros(1))
        optimizer = OuterOptimizer(
            torch.optim.SGD(model.parameters(), lr=1.0),
            model,
            Schedule(every=2),
            exchange=Plain(),
            outer=plain_sgd(1.0),
            ranks=FixedRanks(transport=rank.transport),
        )
        model.cache = torch.zeros(2)  # the buffer has grown on all ranks
        found = []
        for _ in range(6):
            model.weight.grad = torch.full_like(model.weight, -1.0)
            try:
                optimizer.step()
            except HookConfigError:
                found.append(model.weight.item())
        with optimizer.global_parameters():
            assert model.weight.item() == 6.0
        return found, optimizer.landed

    assert simulate(2, body) == [([2.0, 4.0, 6.0], 3)] * 2


class Breaks(Reduction):
    """Averages, and raises once on one member."""

    name = "breaks"
    armed = False

    def run(self, bucket: Bucket, ctx: StepContext) -> Any:
        if self.armed and not bucket.buffer.is_meta:
            self.armed = False
            raise ValueError("of its own")
        yield AllReduce(bucket.buffer)


@pytest.mark.parametrize("async_quorum", [True, False])
def test_a_member_comes_back_in_a_round_in_which_every_reduction_raises(async_quorum: bool) -> None:
    """The member receives the others' start in that round and keeps it. A round with errors also goes to the vote."""
    died: list[int] = []

    def live(manager: Any, again: bool = False) -> dict[int, str]:
        model, reduction = make(5 if again else 0), Breaks()
        optimizer = OuterOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1),
            model,
            Schedule(every=2),
            exchange=reduction,
            ranks=Members(manager),
        )
        reduction.armed = again
        found, broken = {}, False
        while manager.current_step() < 9:
            if manager.name == "a" and optimizer.landed == 4 and not broken:
                broken = reduction.armed = True
            try:
                train(model, optimizer, ord(manager.name), range(optimizer.count, optimizer.count + 1))
            except ValueError:
                found[-1] = "raised"
            found[manager.current_step()] = checksum(optimizer.rounds.shared.fragments[0].starts["0.weight"])
        return found

    def body(manager: Any) -> dict[int, str]:
        try:
            return live(manager)
        except ch_testing.SimulatedDeath:
            return live(manager.cluster.join(manager.name), True)

    def dies(manager: Any, number: int) -> None:
        if manager.name == "b" and manager.current_step() == 3 and number == 1 and not died:
            died.append(1)
            manager.die(return_at=5)

    with ch_testing.SimulatedCluster(async_quorum=async_quorum) as cluster:
        cluster.on_collective = dies
        found = cluster.run(dict.fromkeys("ab", body))
    assert [one[-1] for one in found.values()] == ["raised", "raised"]
    assert found["a"][9] == found["b"][9]
