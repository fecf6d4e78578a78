"""All-to-all and all-gather over a simulated manager, for the quantized family and fp32 sums of 16-bit numbers."""

import copy
from typing import Any

import pytest
import torch

from ch_ft import DistributedDataParallel, ManagerTransport, OptimizerWrapper
from ch_ft.transport import MemberCollectives
from ch_testing import SimulatedCluster, SimulatedDeath, SimulatedManager
from commhooks import TransportError

NET = torch.nn.Sequential(torch.nn.Linear(40, 40), torch.nn.Tanh(), torch.nn.Linear(40, 40), torch.nn.Linear(40, 40))
CAP = 0.0063  # MB. A weight and its bias give three buckets
QUANT = "quant4(block=32, error_feedback=True)"
HOOKS = ["quant8(block=32)", "bf16_compress(accumulate='fp32')"]


def data(name: str, step: int) -> torch.Tensor:
    return torch.randn(4, 40, generator=torch.Generator().manual_seed(step * 1000 + ord(name)))


def gradients(name: str, step: int = 0) -> torch.Tensor:
    module = copy.deepcopy(NET)
    module(data(name, step)).pow(2).mean().backward()
    return flat(module)


def flat(module: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.reshape(-1) for p in module.parameters() if p.grad is not None])


def once(manager: SimulatedManager, hook: str = HOOKS[0], step: int = 0) -> torch.Tensor:
    """Return the average of one backward."""
    model = DistributedDataParallel(manager, copy.deepcopy(NET), hook=hook, bucket_cap_mb=CAP)
    manager.register_state_dict_fn("model", model.load_state_dict, model.state_dict)
    manager.start_quorum()
    model(data(manager.name, step)).pow(2).mean().backward()
    assert manager.errored() is None
    assert manager.should_commit()
    return flat(model)


def near(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Check that the error is at most that of two roundings to 8 bits."""
    assert float((found - expected).norm()) < 2e-2 * float(expected.norm())


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("members", ["a", "ab", "abc", "abcde"])
def test_the_average_is_over_the_participants_and_the_same_on_all(hook: str, members: str) -> None:
    with SimulatedCluster() as cluster:
        results = cluster.run(dict.fromkeys(members, lambda manager: once(manager, hook)))
    expected = torch.stack([gradients(name) for name in members]).mean(0)
    for found in results.values():
        near(found, expected)
        assert torch.equal(found, results["a"])


@pytest.mark.parametrize("healing", ["a", "b", "c"])
@pytest.mark.parametrize("hook", HOOKS)
def test_a_healing_member_adds_nothing_and_owns_no_part(hook: str, healing: str) -> None:
    """Only participants own parts and count in the divisor, for every number of the healing member in the group."""

    def body(manager: SimulatedManager) -> torch.Tensor:
        if manager.name != healing:
            manager._step = 3
        return once(manager, hook)

    with SimulatedCluster() as cluster:
        results = cluster.run(dict.fromkeys("abc", body))
    near(results["a"], torch.stack([gradients(name) for name in "abc" if name != healing]).mean(0))
    assert all(torch.equal(found, results["a"]) for found in results.values())


def test_spares_own_no_part() -> None:
    with SimulatedCluster(max_participants=2) as cluster:
        results = cluster.run(dict.fromkeys("abcd", once))
    near(results["d"], torch.stack([gradients(name) for name in "ab"]).mean(0))
    assert all(torch.equal(found, results["a"]) for found in results.values())


def test_members_that_are_counted_but_heal_are_not_divided_by() -> None:
    """As in torchft at step 0, all members count, and all but one heal."""

    class Counted(SimulatedManager):
        def num_participants(self) -> int:
            return len(self.quorum.members) if self.quorum is not None else 0

        def participating_rank(self) -> int | None:
            return self.quorum.members.index(self.name) if self.quorum is not None else None

    def body(manager: SimulatedManager) -> torch.Tensor:
        manager.__class__ = Counted
        manager._step = int(manager.name == "b")
        return once(manager)

    with SimulatedCluster() as cluster:
        results = cluster.run(dict.fromkeys("abc", body))
    near(results["a"], gradients("b"))
    assert all(torch.equal(found, results["a"]) for found in results.values())


class Counting:
    """Wraps a member's group and adds up the bytes that it sends."""

    def __init__(self, group: Any) -> None:
        self.group, self.sent = group, 0

    def size(self) -> int:
        return int(self.group.size())

    def allgather(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        self.sent += inputs[0].nbytes * (self.size() - 1)
        return self.group.allgather(outputs, inputs, opts)

    def alltoall_base(self, output: Any, input: Any, *rest: Any) -> Any:
        self.sent += input.nbytes * (self.size() - 1) // self.size()
        return self.group.alltoall_base(output, input, *rest)


@pytest.mark.parametrize("members", ["ab", "abcd"])
def test_bytes_do_not_grow_with_the_members(members: str) -> None:
    """A member sends 2 (W - 1) / W of a byte for each number and scale, never W times that."""

    def body(manager: SimulatedManager) -> tuple[int, int]:
        summed = [0]
        allreduce, group = manager.allreduce, Counting(manager.process_group)

        def counted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            summed[0] += tensor.nbytes
            return allreduce(tensor, *args, **kwargs)

        manager.allreduce, manager.process_group = counted, group
        once(manager)
        return group.sent, summed[0]

    with SimulatedCluster() as cluster:
        results = cluster.run(dict.fromkeys(members, body))
    world, weights = len(members), 3 * 40 * 40
    once_ = weights * (1 + 2 / 32)  # codes and scales
    for sent, summed in results.values():
        assert sent <= 2 * (world - 1) / world * once_ * 1.03 + 8 * (world - 1)
        assert summed < 4 * 3 * 40 + 200  # biases, fingerprints, status


def test_a_run_of_kills_heals_and_vetoes_leaves_the_members_equal() -> None:
    """A member dies before each collective of a step in turn, and returns two steps later."""
    last = 24
    states: dict[int, set[str]] = {}
    sizes: set[int] = set()
    drops: list[int] = []

    def collective(manager: SimulatedManager, number: int) -> None:
        step = manager.current_step()
        if step % 3 == 1 and step < last - 3 and manager.name == "abc"[step // 3 % 3] and number == step // 3:
            manager.die(return_at=step + 2)

    def life(manager: SimulatedManager) -> None:
        module = copy.deepcopy(NET)
        model = DistributedDataParallel(manager, module, hook=QUANT, bucket_cap_mb=CAP)
        inner = torch.optim.SGD(model.parameters(), lr=0.05)
        optimizer = OptimizerWrapper(manager, inner)
        manager.register_state_dict_fn("model", module.load_state_dict, module.state_dict)
        while manager.current_step() < last:
            optimizer.zero_grad()
            step = manager.current_step()
            model(data(manager.name, step)).pow(2).mean().backward()
            if optimizer.step():
                total = sum(float(p.detach().double().norm()) for p in module.parameters())
                states.setdefault(step, set()).add(total.hex())
                sizes.add(manager.num_participants())
        drops.append(optimizer.drops)

    def lives(manager: SimulatedManager) -> None:
        while True:
            try:
                return life(manager)
            except SimulatedDeath:
                manager = manager.cluster.join(manager.name)

    with SimulatedCluster() as cluster:
        cluster.on_collective = collective
        cluster.run(dict.fromkeys("abc", lives))
        attempts = len(cluster.history)
    assert all(len(texts) == 1 for texts in states.values()), states
    assert len(states) == last
    assert {2, 3} <= sizes
    assert attempts == last + 7, "each of seven deaths costs one attempt"


def test_a_peer_that_is_lost_is_reported_to_the_manager_and_ends_the_rest() -> None:
    def body(manager: SimulatedManager) -> None:
        manager.start_quorum()
        transport = ManagerTransport(manager, members=MemberCollectives(manager, manager.process_group))
        transport.begin()
        transport.meet()
        if manager.name == "b":
            manager.die()
        output = torch.zeros(6)
        with pytest.raises(TransportError, match=r"an all-to-all over the manager failed: RuntimeError: \w died"):
            transport.all_to_all(output, torch.ones(6)).wait(None)
        with pytest.raises(TransportError, match="an all-gather over the manager failed"):
            transport.all_gather(output, torch.ones(2)).wait(None)
        assert not manager.should_commit()

    with SimulatedCluster() as cluster:
        cluster.run(dict.fromkeys("abc", body))
