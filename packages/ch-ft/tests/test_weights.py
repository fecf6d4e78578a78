"""Weighted averages over a manager: members that come, heal and leave."""

import copy
import math
from typing import Any

import pytest
import torch

import commhooks
from ch_ft import DistributedDataParallel, OptimizerWrapper
from ch_testing import SimulatedCluster, SimulatedManager
from commhooks import HookConfigError, HookNotSupportedError, Plain, Reducer

CAP = 0.0005  # MB, which gives three buckets
NET = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 16), torch.nn.Linear(16, 1))
WEIGHTS = {"a": 1000.0, "b": 3000.0, "c": 16.0}
BOUNDS = {"allreduce": 1e-6, "bf16_compress": 1e-2, "powersgd(rank=4, min_compression_rate=1)": 1.0}


def weight(name: str, step: int) -> float:
    """Return a member's weight, which grows a thousandfold in step 4, so that the reference changes."""
    return WEIGHTS[name] * (1000.0 if step >= 4 else 1.0)


def gradient(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.reshape(-1).double() for p in model.parameters() if p.grad is not None])


def data(name: str, step: int) -> torch.Tensor:
    return torch.randn(4, 16, generator=torch.Generator().manual_seed(step * 1000 + ord(name)))


def wanted(names: list[str], step: int) -> torch.Tensor:
    total, found = math.fsum(weight(name, step) for name in names), torch.zeros(())
    for name in names:
        module = copy.deepcopy(NET)
        module(data(name, step)).pow(2).mean().backward()
        found = found + weight(name, step) / total * gradient(module)
    return found


def member(
    manager: SimulatedManager, hook: str
) -> tuple[DistributedDataParallel, commhooks.CommHook, OptimizerWrapper]:
    """Return a member's model with a weighted hook, and an optimizer that changes nothing."""
    model = DistributedDataParallel(manager, copy.deepcopy(NET), bucket_cap_mb=CAP)
    handle = commhooks.attach(model, hook, weighted=True)
    return model, handle, OptimizerWrapper(manager, torch.optim.SGD(model.parameters(), lr=0.0))


class Train:
    """The body of a member. It records the gradients of every committed step.

    Member b misses the commit of step 3, so it heals in step 4. All members vote step 5 down once. Member c dies in step 6.
    """

    def __init__(self, hook: str, steps: int) -> None:
        self.hook, self.steps = hook, steps
        self.gradients: dict[tuple[int, str], torch.Tensor] = {}
        self.references: dict[tuple[int, str], float | None] = {}

    def __call__(self, manager: SimulatedManager) -> None:
        name = manager.name
        model, handle, optimizer = member(manager, self.hook)
        manager.register_state_dict_fn("model", model.load_state_dict, model.state_dict)
        failed = set[int]()
        while (step := manager.current_step()) < self.steps:
            optimizer.zero_grad()
            step = manager.current_step() if manager.num_participants() else step
            loss = model(data(name, step)).pow(2).mean()
            handle.weigh(weight(name, step))
            loss.backward()
            if name == "c" and step == 6:
                manager.die()
            if ((name == "b" and step == 3) or step == 5) and step not in failed:
                failed.add(step)
                manager.report_error(RuntimeError("this batch is bad"))
            if optimizer.step():
                self.gradients[step, name] = gradient(model)
                self.references[step, name] = handle.hook_state.versions.next_reference  # type: ignore[union-attr]


@pytest.mark.parametrize("async_quorum", [True, False])
@pytest.mark.parametrize("hook", BOUNDS)
def test_members_that_come_and_leave_weigh_what_they_have_seen(hook: str, async_quorum: bool) -> None:
    train = Train(hook, 9)
    with SimulatedCluster(async_quorum=async_quorum) as cluster:
        cluster._returning["c"] = 2  # the quorum waits for c at step 2
        cluster.run(dict.fromkeys("abc", train))
        members = dict(cluster.history)  # participants of the last attempt of each step
    assert members[1] == ["a", "b"] and members[5] == ["a", "b", "c"] and members[8] == ["a", "b"]
    assert members[4] == (["a", "c"] if async_quorum else ["a", "b", "c"])  # b heals
    for step, names in members.items():
        first, committed = train.gradients[step, "a"], [name for at, name in train.gradients if at == step]
        assert len(committed) == len(names) + (step in (2, 4) and async_quorum) - (step in (3, 6)), (step, committed)
        for name in committed:  # also a member that healed, whose own gradient did not count
            assert torch.equal(train.gradients[step, name], first), (step, name)
            assert train.references[step, name] == train.references[step, "a"], (step, name)
        exact = wanted(names, step)
        assert (first - exact).norm() <= BOUNDS[hook] * exact.norm(), step


@pytest.mark.parametrize("async_quorum", [True, False])
def test_the_first_step_of_large_weights_does_not_overflow(async_quorum: bool) -> None:
    """Weights of a million times a gradient are beyond fp16. The first attempt is voted down."""

    def body(manager: SimulatedManager) -> list[Any]:
        model, handle, optimizer = member(manager, "fp16_compress")
        found: list[Any] = []
        for attempt in range(4):
            optimizer.zero_grad()
            loss = model(data(manager.name, 0)).pow(2).mean()
            handle.weigh(WEIGHTS[manager.name] * 1e4)
            loss.backward()
            if not attempt:
                manager.report_error(RuntimeError("this batch is bad"))
            if optimizer.step():
                found.append((gradient(model), handle.hook_state.versions.next_reference))  # type: ignore[union-attr]
        return found

    with SimulatedCluster(async_quorum=async_quorum) as cluster:
        found = cluster.run(dict.fromkeys("ab", body))
    exact = wanted(["a", "b"], 0)
    for name, steps in found.items():
        assert len(steps) == 3 and {reference for _, reference in steps} == {2.0**24}, (name, [r for _, r in steps])
        assert all((one - exact).norm() <= 1e-2 * exact.norm() for one, _ in steps), name


def test_a_wrong_weight_is_one_error_on_all_members_and_commits_nothing() -> None:
    def body(manager: SimulatedManager) -> list[Any]:
        model, handle, optimizer = member(manager, "bf16_compress")
        found: list[Any] = []
        for attempt in range(2):
            optimizer.zero_grad()
            loss = model(data(manager.name, 0)).pow(2).mean()
            handle.weigh(-1.0 if manager.name == "b" and not attempt else 2.0)
            try:
                loss.backward()
                found.append("")
            except HookConfigError as error:
                found.append("-1" in str(error))
            found.append(optimizer.step())
        return found

    with SimulatedCluster() as cluster:
        assert cluster.run(dict.fromkeys("ab", body)) == {key: [True, False, "", True] for key in "ab"}


def test_a_reducer_over_a_manager_takes_no_weights() -> None:
    def body(manager: SimulatedManager) -> None:
        handle = commhooks.create(Plain())
        with pytest.raises(HookNotSupportedError, match="over a manager"):
            Reducer(handle, {"w": torch.zeros(2)}, manager=manager, weighted=True)
        assert not handle.attached

    with SimulatedCluster() as cluster:
        cluster.run({"a": body})
