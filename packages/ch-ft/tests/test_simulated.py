"""PowerSGD over the simulator, with hundreds of steps, kills and heals. It also measures the loss after a departure."""

import copy
import random
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from ch_ft import DistributedDataParallel, OptimizerWrapper
from ch_testing import SimulatedCluster, SimulatedDeath, SimulatedManager

NET = torch.nn.Sequential(
    torch.nn.Linear(24, 24), torch.nn.Tanh(), torch.nn.Linear(24, 24), torch.nn.Tanh(), torch.nn.Linear(24, 24)
)
BUCKET_CAP_MB = 0.00225  # a weight and its bias, which gives three buckets
COLLECTIVES = 7  # before the status of a step: fingerprints, three P's, three Q's


@pytest.fixture(autouse=True)
def quick_turns() -> Iterator[None]:
    """Members are threads that wait for each other. A shorter switch interval than Python's 5 ms lets the next one run
    sooner.
    """
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.0005)
    yield
    sys.setswitchinterval(before)


@dataclass(frozen=True)
class Kill:
    """Kill ``name`` at ``step`` before its collective ``number``. A new member of that name heals at ``back``."""

    name: str
    step: int
    number: int
    back: int


def script(steps: int, seed: int) -> tuple[list[Kill], set[int]]:
    """Return random kills that always leave a member alive, and steps whose first attempt all members reject.

    Neither happens in a step with a heal. A member that heals in an aborted attempt takes part in the next one. A run
    without that attempt has no counterpart.
    """
    rng = random.Random(seed)
    kills: list[Kill] = []
    busy = dict.fromkeys("abc", 0)  # a member is dead or healing up to and including this step
    for step in range(1, steps - 10):
        alive = [name for name, until in busy.items() if until < step]
        if len(alive) > 1 and step not in busy.values() and rng.random() < 0.12:
            kill = Kill(rng.choice(alive), step, rng.randrange(COLLECTIVES), step + rng.randint(1, 8))
            kills.append(kill)
            busy[kill.name] = kill.back
    vetoes = {step for step in range(1, steps - 10) if rng.random() < 0.08}
    return kills, vetoes - {k.step for k in kills} - {k.back for k in kills}


class Run:
    """One training run of three members under a script.

    With ``aborts`` the script interrupts attempts. Without it, the same members miss the same steps but leave before
    these begin, and no vote fails.
    """

    def __init__(self, steps: int, kills: list[Kill], vetoes: set[int], aborts: bool, hook: str) -> None:
        self.steps, self.kills, self.vetoes, self.aborts, self.hook = steps, kills, vetoes, aborts, hook
        self.done: set[tuple[str, int]] = set()
        self.states: dict[tuple[str, int], str] = {}
        self.drops = 0
        self.compressed = 0.0

    def run(self) -> "Run":
        with SimulatedCluster() as cluster:
            cluster.on_collective = self.collective
            cluster.run(dict.fromkeys("abc", self.lives))
        return self

    def due(self, manager: SimulatedManager) -> Kill | None:
        at = manager.name, manager.current_step()
        found = next((k for k in self.kills if (k.name, k.step) == at), None)
        return found if found is not None and at not in self.done else None

    def collective(self, manager: SimulatedManager, number: int) -> None:
        kill = self.due(manager)
        if self.aborts and kill is not None and kill.number == number:
            self.die(manager, kill)

    def die(self, manager: SimulatedManager, kill: Kill) -> None:
        self.done.add((kill.name, kill.step))
        manager.die(return_at=kill.back)

    def lives(self, manager: SimulatedManager) -> None:
        """Run a member's thread, one life after the other."""
        while True:
            try:
                return self.life(manager)
            except SimulatedDeath:
                manager = manager.cluster.join(manager.name)

    def life(self, manager: SimulatedManager) -> None:
        module = copy.deepcopy(NET)
        model = DistributedDataParallel(manager, module, hook=self.hook, bucket_cap_mb=BUCKET_CAP_MB)
        inner = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
        optimizer = OptimizerWrapper(manager, inner)
        manager.register_state_dict_fn("model", module.load_state_dict, module.state_dict)
        manager.register_state_dict_fn("optim", inner.load_state_dict, inner.state_dict)
        while manager.current_step() < self.steps:
            kill = self.due(manager)
            if not self.aborts and kill is not None:
                self.die(manager, kill)
            optimizer.zero_grad()
            step = manager.current_step()
            if self.aborts and step in self.vetoes and (manager.name, step) not in self.done:
                self.done.add((manager.name, step))
                manager.report_error(RuntimeError("a bad batch"))
            data = torch.randn(4, 24, generator=torch.Generator().manual_seed(step * 1000 + ord(manager.name)))
            (model(data) - data.roll(1, 1)).pow(2).mean().backward()
            optimizer.step()
            self.drops += not optimizer.committed
            if optimizer.committed:
                self.states[manager.name, step] = self.text(model)
        assert model.handle is not None
        assert model.handle.binding is not None
        stats = model.handle.stats()
        self.compressed += stats["compressed_steps"]
        assert model.handle.binding.calls % 3 == 0, "three buckets"

    @staticmethod
    def text(model: DistributedDataParallel) -> str:
        """Return parameters, Q and residual as exact text."""
        assert model.handle is not None
        tensors: list[Any] = [*model.parameters(), *(t for _, _, t in model.handle.state.entries())]
        return " ".join(float(t.detach().double().norm()).hex() for t in tensors)


@pytest.mark.full
@pytest.mark.timeout(200)
def test_500_steps_of_kills_and_heals_equal_a_run_without_the_aborted_attempts() -> None:
    steps = 500
    kills, vetoes = script(steps, seed=1)
    assert len(kills) > 30
    assert len(vetoes) > 10
    troubled = Run(steps, kills, vetoes, aborts=True, hook="powersgd(rank=2)").run()
    clean = Run(steps, kills, vetoes, aborts=False, hook="powersgd(rank=2)").run()
    assert troubled.drops >= len(vetoes)
    assert clean.drops == 0
    assert clean.compressed > 0
    assert troubled.states == clean.states
    for step in range(steps):
        texts = [text.split(" ") for (_, at), text in clean.states.items() if at == step]
        assert len({tuple(words[: len(NET.state_dict())]) for words in texts}) == 1, "the parameters are the same"


# -- the loss after a departure

STEPS, LEAVES, BIAS = 230, 180, 0.15  # bias is the distance between a member's target and the common one


class Target(torch.nn.Module):
    """Mean squared distance of a matrix from a target. Each member sees the target through its own noise."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(48, 48))

    def forward(self, seen: torch.Tensor) -> torch.Tensor:
        return (self.weight - seen).pow(2).sum() / 2


def departure(hook: str, steps: int = STEPS, leaves: int = LEAVES) -> list[float]:
    """Return the loss at every step, without noise and relative to the start. One of four members leaves for good."""
    target = torch.randn(48, 48, generator=torch.Generator().manual_seed(0))
    losses: list[float] = []

    def body(manager: SimulatedManager) -> None:
        module = Target()
        model = DistributedDataParallel(manager, module, hook=hook)
        optimizer = OptimizerWrapper(manager, torch.optim.SGD(model.parameters(), lr=0.02))
        bias = torch.randn(48, 48, generator=torch.Generator().manual_seed(ord(manager.name))) * BIAS
        while manager.current_step() < steps:
            step = manager.current_step()
            if manager.name == "d" and step == leaves:
                manager.die()
            noise = torch.randn(48, 48, generator=torch.Generator().manual_seed(step * 1000 + ord(manager.name)))
            optimizer.zero_grad()
            model(target + bias + noise).backward()
            optimizer.step()
            if manager.name == "a":
                losses.append(float((module.weight.detach() - target).pow(2).mean() / target.pow(2).mean()))

    with SimulatedCluster() as cluster:
        cluster.run(dict.fromkeys("abcd", body))
    return losses


@pytest.mark.full
@pytest.mark.timeout(120)
def test_the_local_residual_survives_a_departure() -> None:
    leaves, rank = LEAVES, 4
    plain = departure("allreduce")
    local = departure(f"powersgd(rank={rank})")
    averaged = departure(f'powersgd(rank={rank}, residual="averaged")')
    runs = {"plain": plain, "local": local, "averaged": averaged}
    after = {name: max(losses[leaves:]) for name, losses in runs.items()}
    before = {name: losses[leaves - 1] for name, losses in runs.items()}
    print("\nworst loss after one of four members left:", {k: f"{before[k]:.5f} -> {v:.5f}" for k, v in after.items()})
    assert after["local"] < 2 * after["plain"]
    assert after["averaged"] > 2 * after["local"]


def test_no_forward_is_taken_for_running_afterwards() -> None:
    """Forwards of members overlap. torch has one variable for all of them, which torch.compile reads."""
    first_in, second_in, first_out = (threading.Event() for _ in range(3))

    def overlap(module: torch.nn.Module, inputs: object) -> None:
        if threading.current_thread().name == "a":
            first_in.set()
            assert second_in.wait(20)
        else:
            second_in.set()
            assert first_out.wait(20)

    def body(manager: SimulatedManager) -> None:
        module = torch.nn.Linear(2, 1)
        module.register_forward_pre_hook(overlap)
        model = DistributedDataParallel(manager, module)
        manager.start_quorum()
        assert manager.name == "a" or first_in.wait(20)
        loss = model(torch.ones(1, 2)).sum()
        first_out.set()
        loss.backward()

    before = DistributedDataParallel._active_ddp_module
    with SimulatedCluster() as cluster:
        cluster.run(dict.fromkeys("ab", body))
    assert DistributedDataParallel._active_ddp_module is before
