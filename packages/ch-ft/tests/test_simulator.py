"""The simulator compared with torchft's real Manager, and random runs with members that fail within a round."""

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

import ch_ft
from ch_ft import DistributedDataParallel, OptimizerWrapper
from ch_testing import SimulatedCluster, SimulatedDeath, SimulatedManager

Outcome = list[tuple[object, ...]]
COLLECTIVES = 3
STEPS = 25


def attempts(manager: Any, reports: bool, place: int) -> Outcome:
    """Run three attempts of three all-reduces each. In the second, one member reports an error before number ``place``."""
    found: Outcome = []
    for attempt in range(3):
        manager.start_quorum()
        found.append(("participants", manager.num_participants()))
        for number in range(COLLECTIVES + 1):
            if attempt == 1 and reports and number == place:
                manager.report_error(RuntimeError("reported"))
            if number < COLLECTIVES:
                tensor = torch.full((2,), 3.0)
                manager.allreduce(tensor).wait()
                failed = manager.errored() is not None
                found.append((number, "failed" if failed else tensor.tolist()))
        found.append(("committed", manager.should_commit(), manager.current_step()))
    return found


def over_torchft(place: int) -> list[Outcome]:
    quorum = pytest.importorskip("ch_testing.torchft.quorum")

    def one(number: int, address: str) -> Outcome:
        with ch_ft.local(
            lighthouse=address,
            replica=f"replica_{number}",
            state_dict=dict,
            load_state_dict=lambda state: None,
            group_timeout=8,
            init_sync=False,
        ) as member:
            return attempts(member.manager, number == 0, place)

    with quorum.lighthouse(min_replicas=2, heartbeat=5.0, join_timeout=5.0) as address, ThreadPoolExecutor(2) as pool:
        return [future.result(timeout=60) for future in [pool.submit(one, n, address) for n in range(2)]]


def simulated(place: int) -> list[Outcome]:
    bodies: dict[str, Callable[[SimulatedManager], Outcome]] = {
        "0": lambda manager: attempts(manager, True, place),
        "1": lambda manager: attempts(manager, False, place),
    }
    with SimulatedCluster() as cluster:
        return list(cluster.run(bodies).values())


@pytest.mark.timeout(120)
@pytest.mark.parametrize("place", [0, pytest.param(2, marks=pytest.mark.full), COLLECTIVES])
def test_a_reported_error_has_the_same_outcome_as_over_torchft(place: int) -> None:
    pytest.importorskip("torchft")
    assert simulated(place) == over_torchft(place)


@pytest.mark.parametrize("place", range(COLLECTIVES + 1))
def test_a_reported_error_fails_the_collectives_that_its_member_leaves_out(place: int) -> None:
    reporter, peer = simulated(place)
    second = slice(5, 10)  # lines of the second attempt
    sums = [(number, "failed" if number >= place else [3.0, 3.0]) for number in range(COLLECTIVES)]
    late = place == COLLECTIVES
    assert peer[second] == [("participants", 2), *sums, ("committed", late, 2 if late else 1)]
    assert reporter[second] == [("participants", 2), *sums, ("committed", False, 1)]
    assert reporter[10] == ("participants", 1 if late else 2), "late, its peer has committed and it heals"


# -- random runs

HOOKS = [
    None,
    "powersgd(rank=1, min_compression_rate=0.5)",
    "quant4(error_feedback=True, exempt=False)",
    "bf16_compress",
]


class Script:
    """Draw the fate of each member at each of its collectives. Two runs of one seed draw the same."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.drops = self.deaths = self.reports = 0
        self.seen: dict[tuple[str, int], int] = {}

    def __call__(self, manager: SimulatedManager, number: int) -> None:
        step, name = manager.current_step(), manager.name
        draw = random.Random(f"{self.seed} {name} {step} {number}")
        chance = draw.random()
        key = name, step
        if chance > 0.03 or key in self.seen or not 1 <= step < STEPS - 4 or not manager.is_participating():
            return
        self.seen[key] = number
        if chance < 0.01 and manager.members() > 1 and name != "a":
            self.deaths += 1
            manager.die(return_at=min(step + draw.randint(1, 3), STEPS - 2))
        self.reports += 1
        manager.report_error(RuntimeError(f"{name} at {number} of step {step}"))


def train(script: Script, hook: str | None, asynchronous: bool) -> dict[tuple[str, int], list[torch.Tensor]]:
    states: dict[tuple[str, int], list[torch.Tensor]] = {}

    def life(manager: SimulatedManager) -> None:
        module = nn.Sequential(nn.Linear(12, 12), nn.Linear(12, 12), nn.Linear(12, 4))
        for i, p in enumerate(module.parameters()):
            nn.init.constant_(p, 0.05 * (i + 1))
        model = DistributedDataParallel(manager, module, hook=hook, bucket_cap_mb=0.0004)
        inner = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
        optimizer = OptimizerWrapper(manager, inner)
        manager.register_state_dict_fn("model", module.load_state_dict, module.state_dict)
        manager.register_state_dict_fn("optim", inner.load_state_dict, inner.state_dict)
        while manager.current_step() < STEPS:
            optimizer.zero_grad()
            step = manager.current_step()
            x = torch.randn(4, 12, generator=torch.Generator().manual_seed(100 * step + ord(manager.name)))
            model(x).square().mean().backward()
            if optimizer.step():
                states[manager.name, manager.current_step()] = [p.detach().clone() for p in module.parameters()]
            else:
                script.drops += 1

    def lives(manager: SimulatedManager) -> None:
        while True:
            try:
                return life(manager)
            except SimulatedDeath:
                manager = manager.cluster.join(manager.name)

    with SimulatedCluster(async_quorum=asynchronous) as cluster:
        cluster.on_collective = script
        cluster.run(dict.fromkeys("abc", lives))
    return states


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(1, 8))])
def test_random_runs_prove_something(seed: int) -> None:
    """Every run ends, loses attempts, gives all members one state at each step, and repeats to the bit."""
    hook, asynchronous = HOOKS[seed % len(HOOKS)], seed % 3 > 0
    first, again = Script(seed), Script(seed)
    states = train(first, hook, asynchronous)
    assert first.reports > 0
    assert first.drops > 0
    for step in range(1, STEPS + 1):
        members = [tensors for (_, at), tensors in states.items() if at == step]
        assert members, step
        assert all(torch.equal(x, y) for other in members[1:] for x, y in zip(members[0], other, strict=True)), step
    repeated = train(again, hook, asynchronous)
    assert (first.drops, first.deaths, first.seen) == (again.drops, again.deaths, again.seen)
    assert states.keys() == repeated.keys()
    assert all(torch.equal(x, y) for key in states for x, y in zip(states[key], repeated[key], strict=True))
