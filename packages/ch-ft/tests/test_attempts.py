"""Several backward passes between a quorum and its vote are committed or dropped together, for every voter."""

import copy
import gc
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

import commhooks
from ch_ft import DistributedDataParallel, OptimizerWrapper
from ch_ft.attempts import attempts_of
from ch_testing import SimulatedCluster, SimulatedManager
from commhooks import AttachError, HookConfigError, Plain

from .stages import TwoStage

CAP = 0.0005  # MB, which gives three buckets
NET = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 16), torch.nn.Linear(16, 1))


def net() -> torch.nn.Module:
    """Return a copy with equal weights on every member, because threads share the random number generator."""
    return copy.deepcopy(NET)


def data(name: str, step: int, backward: int) -> torch.Tensor:
    return 10 * torch.randn(4, 16, generator=torch.Generator().manual_seed(step * 1000 + backward * 100 + ord(name)))


def loss(model: Any, name: str, step: int, backward: int) -> torch.Tensor:
    found: torch.Tensor = model(data(name, step, backward)).pow(2).mean()
    return found


def grads(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.reshape(-1).double() for p in model.parameters() if p.grad is not None])


def entries(model: DistributedDataParallel, field: str = "") -> dict[str, torch.Tensor]:
    assert model.handle is not None
    found = {f"{name}.{f}": t.clone() for name, f, t in model.handle.state.entries()}
    return {key: t for key, t in found.items() if key.endswith(field)}


def owed(model: DistributedDataParallel) -> torch.Tensor:
    """Return the residuals in the order of the parameters."""
    assert model.handle is not None
    held = {name: t for name, field, t in model.handle.state.entries() if field == "residual"}
    return torch.cat([held[name].reshape(-1).double() for name, _ in model.module.named_parameters()])


def vote_with_wrapper(manager: SimulatedManager, inner: torch.optim.Optimizer) -> Any:
    return OptimizerWrapper(manager, inner)


class ByHand:
    """Torchft's own optimizer wrapper. It does not inform the hook."""

    def __init__(self, manager: SimulatedManager, inner: torch.optim.Optimizer) -> None:
        self.manager, self.inner = manager, inner

    def zero_grad(self) -> None:
        self.manager.start_quorum()
        self.inner.zero_grad()

    def step(self) -> None:
        if self.manager.should_commit():
            self.inner.step()


@pytest.mark.parametrize("optimizer", [vote_with_wrapper, ByHand])
@pytest.mark.parametrize("backwards", [1, 2, 3])
def test_applied_and_owed_are_the_sum_of_the_gradients(optimizer: Any, backwards: int) -> None:
    """Parameters stay constant, so that the test can compute each gradient again. The vote rejects attempt 2."""

    def body(manager: SimulatedManager) -> tuple[torch.Tensor, ...]:
        model = DistributedDataParallel(manager, net(), hook=TwoStage(), bucket_cap_mb=CAP)
        ender = optimizer(manager, torch.optim.SGD(model.parameters(), lr=0.0))
        applied, true = torch.zeros(1), torch.zeros(1)
        for attempt in range(5):
            ender.zero_grad()
            for backward in range(backwards):
                loss(model, manager.name, attempt, backward).backward()
            if attempt == 2:
                manager.report_error(RuntimeError("bad batch"))
            else:
                applied = applied + grads(model)
                alone = net()
                for backward in range(backwards):
                    loss(alone, manager.name, attempt, backward).backward()
                true = true + grads(alone)
            ender.step()
        assert manager.current_step() == 4
        assert model.handle is not None
        model.handle.commit()
        return applied, owed(model), true

    with SimulatedCluster() as cluster:
        results = cluster.run(dict.fromkeys("ab", body))
    assert torch.equal(results["a"][0], results["b"][0])
    sent = results["a"][0] + (results["a"][1] + results["b"][1]) / 2
    assert results["a"][1].any()
    torch.testing.assert_close(sent, (results["a"][2] + results["b"][2]) / 2, rtol=1e-4, atol=1e-4)


def trained(
    manager: SimulatedManager, optimizer: Any, bad: Callable[[SimulatedManager, int], bool], steps: int = 5
) -> dict[str, torch.Tensor]:
    """Return the hook's state after some commits. At most one attempt of a step fails, with two backwards."""
    model = DistributedDataParallel(manager, net(), hook=TwoStage(), bucket_cap_mb=CAP)
    ender = optimizer(manager, torch.optim.SGD(model.parameters(), lr=1e-4))
    seen: set[int] = set()
    while manager.current_step() < steps:
        step = manager.current_step()
        ender.zero_grad()
        loss(model, manager.name, step, 0).backward()
        spoilt = step not in seen and bad(manager, step)
        seen.add(step)
        loss(model, manager.name, step, 1).backward()
        if not spoilt:
            ender.step()
    assert model.handle is not None
    model.handle.commit()
    return entries(model) | {name: p.detach().clone() for name, p in model.module.named_parameters()}


@pytest.mark.parametrize("optimizer", [vote_with_wrapper, ByHand])
def test_a_dropped_attempt_leaves_the_state_as_it_was_before_its_first_backward(optimizer: Any) -> None:
    def reported(manager: SimulatedManager, step: int) -> bool:
        if step in (1, 3):
            manager.report_error(RuntimeError("between two backwards"))
        return False

    def never_voted(manager: SimulatedManager, step: int) -> bool:
        return step in (1, 3)

    with SimulatedCluster() as cluster:
        clean = cluster.run(dict.fromkeys("ab", lambda m: trained(m, optimizer, lambda *_: False)))
    for bad in (reported, never_voted):
        with SimulatedCluster() as cluster:
            found = cluster.run(dict.fromkeys("ab", lambda m, bad=bad: trained(m, optimizer, bad)))
        for name in "ab":
            assert clean[name].keys() == found[name].keys()
            assert all(torch.equal(clean[name][key], found[name][key]) for key in clean[name]), bad.__name__


class Twice(torch.nn.Module):
    """Uses its second layer only in the first backward of an attempt."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = copy.deepcopy(NET)
        self.whole = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second, last = self.layers
        found: torch.Tensor = last(second(first(x)) if self.whole else first(x))
        return found


@pytest.mark.parametrize("async_quorum", [True, False])
def test_a_member_that_heals_in_an_attempt_of_two_backwards_has_the_shared_state(async_quorum: bool) -> None:
    def body(manager: SimulatedManager) -> dict[str, torch.Tensor]:
        model = DistributedDataParallel(manager, Twice(), hook=TwoStage(), bucket_cap_mb=CAP)
        optimizer = OptimizerWrapper(manager, torch.optim.SGD(model.parameters(), lr=1e-4))
        manager.register_state_dict_fn("model", model.load_state_dict, model.state_dict)
        for attempt in range(1 if manager.name == "c" else 4):
            optimizer.zero_grad()
            for backward in range(2):
                model.module.whole = backward == 0
                loss(model, manager.name, 3 if manager.name == "c" else attempt, backward).backward()
            assert optimizer.step()
        return entries(model, "seen") | {name: p.detach().clone() for name, p in model.named_parameters()}

    with SimulatedCluster(async_quorum=async_quorum) as cluster:
        cluster._returning["c"] = 3
        results = cluster.run(dict.fromkeys("abc", body))
    assert results["a"].keys() == results["c"].keys()
    assert len([key for key in results["a"] if key.endswith("seen")]) == 6
    assert all(torch.equal(results["a"][key], results["c"][key]) for key in results["a"])


# -- arguments of attach


def test_residuals_follow_the_scale_of_the_scaler_given_to_attach() -> None:
    """Applied gradients plus residuals equal the sum of the gradients, in units that do not follow the scale."""

    def body(manager: SimulatedManager) -> tuple[torch.Tensor, ...]:
        model = DistributedDataParallel(manager, net(), bucket_cap_mb=CAP)
        scaler = torch.amp.GradScaler("cpu", init_scale=1.0, growth_factor=4.0, growth_interval=2)
        optimizer = OptimizerWrapper(manager, torch.optim.SGD(model.parameters(), lr=0.0))
        model.handle = commhooks.attach(model, TwoStage(), optimizer=optimizer, scaler=scaler)
        applied, true = torch.zeros(1), torch.zeros(1)
        for attempt in range(7):
            optimizer.zero_grad()
            value = loss(model, manager.name, attempt, 0)
            scaler.scale(value * (float("inf") if attempt == 3 else 1.0)).backward()
            if attempt != 3:
                applied = applied + grads(model) / scaler.get_scale()
                alone = net()
                loss(alone, manager.name, attempt, 0).backward()
                true = true + grads(alone)
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() > 1.0
        assert optimizer.commits == 6
        assert model.handle.commit()
        return applied, owed(model), true

    with SimulatedCluster() as cluster:
        results = cluster.run(dict.fromkeys("ab", body))
    sent = results["a"][0] + (results["a"][1] + results["b"][1]) / 2
    torch.testing.assert_close(sent, (results["a"][2] + results["b"][2]) / 2, rtol=1e-4, atol=1e-4)


def test_a_committed_step_that_the_given_optimizer_skipped_is_dropped() -> None:
    """A manual loop may skip the optimizer after the vote, for example because the norm is too large."""

    def body(manager: SimulatedManager, skipped: set[int], again: bool) -> dict[str, torch.Tensor]:
        model = DistributedDataParallel(manager, net(), bucket_cap_mb=CAP)
        inner = torch.optim.SGD(model.parameters(), lr=1e-4)
        model.handle = commhooks.attach(model, TwoStage(), optimizer=inner)
        for number in itertools.count():
            if number == 5:
                break
            if number in skipped and not again:
                continue
            manager.start_quorum()
            inner.zero_grad()
            loss(model, manager.name, number, 0).backward()
            assert manager.should_commit()
            if number not in skipped:
                inner.step()
        inner.zero_grad()
        model.handle.commit()
        return entries(model)

    with SimulatedCluster() as cluster:
        without = cluster.run(dict.fromkeys("ab", lambda m: body(m, {2, 4}, False)))
    with SimulatedCluster() as cluster:
        skipping = cluster.run(dict.fromkeys("ab", lambda m: body(m, {2, 4}, True)))
    for name in "ab":
        assert any(t.any() for t in without[name].values())
        assert all(torch.equal(without[name][key], skipping[name][key]) for key in without[name])


def test_refusals() -> None:
    with SimulatedCluster() as cluster:
        manager, other = cluster.join("a"), cluster.join("b")
        model = DistributedDataParallel(manager, net())
        optimizer = OptimizerWrapper(other, torch.optim.SGD(model.parameters(), lr=0.1))
        with pytest.raises(AttachError, match="votes with another manager than the model's"):
            commhooks.attach(model, Plain(), optimizer=optimizer)
        with pytest.raises(HookConfigError, match=r"expected a torch\.optim\.Optimizer"):
            commhooks.attach(model, Plain(), optimizer=net())  # type: ignore[arg-type]
        commhooks.attach(model, Plain())  # the refused attaches left nothing behind


class Slotted(SimulatedManager):
    """A manager whose methods cannot be replaced."""

    def __setattr__(self, name: str, value: Any) -> None:
        if callable(value) and name in ("start_quorum", "should_commit"):
            raise AttributeError(f"{name} is read-only")
        super().__setattr__(name, value)


def test_a_manager_that_cannot_be_watched_is_refused() -> None:
    with SimulatedCluster() as cluster:
        model = DistributedDataParallel(Slotted(cluster, "a"), net())
        with pytest.raises(HookConfigError, match=r"Slotted\.start_quorum cannot be watched .*leave out __slots__"):
            commhooks.attach(model, Plain())
        with pytest.raises(HookConfigError, match="cannot be watched"):
            commhooks.attach(model, Plain())  # the refusal left no half-replaced method


def test_watching_keeps_no_manager_alive() -> None:
    """Its process group must end with its owner, not at garbage collection."""
    with SimulatedCluster() as cluster:
        manager = SimulatedManager(cluster, "a")
        gc.disable()
        try:
            attempts_of(manager)
            dead = weakref.ref(manager)
            del manager
            assert dead() is None
        finally:
            gc.enable()


@pytest.mark.parametrize("committed", [True, False])
def test_a_hook_detached_before_the_vote_keeps_the_step_by_the_vote(committed: bool) -> None:
    with SimulatedCluster() as cluster:
        manager = cluster.join("a")
        model = DistributedDataParallel(manager, net(), hook="topk(density=0.1)")
        handle = model.handle
        assert handle is not None
        manager.start_quorum()
        loss(model, "a", 0, 0).backward()
        handle.detach()
        del model.handle
        gc.collect()
        if not committed:
            manager.report_error(RuntimeError("a peer is lost"))
        assert manager.should_commit() is committed
        assert not attempts_of(manager).leaving and not attempts_of(manager).voters
        kept = {name for name, field, _ in handle.state.entries() if field == "residual"}
        assert bool(kept) is committed
        assert handle.state.step == int(committed)


def test_a_hook_detached_before_the_vote_drops_the_step_if_no_vote_comes() -> None:
    with SimulatedCluster() as cluster:
        manager = cluster.join("a")
        model = DistributedDataParallel(manager, net(), hook="topk(density=0.1)")
        handle = model.handle
        assert handle is not None
        manager.start_quorum()
        loss(model, "a", 0, 0).backward()
        handle.detach()
        manager.start_quorum()
        assert not attempts_of(manager).leaving
        assert not list(handle.state.entries()) and handle.state.step == 0
