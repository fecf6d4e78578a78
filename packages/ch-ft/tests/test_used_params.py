"""If some members leave a parameter unused, all members get the members' mean, as over torch's DDP."""

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ch_ddp import averaged_params
from ch_ft import DistributedDataParallel, OptimizerWrapper
from ch_ft.used_params import UsedParams
from ch_testing import SimulatedCluster, SimulatedDeath, SimulatedManager
from commhooks import HookConfigError, HookNotSupportedError

pytestmark = pytest.mark.timeout(120)
HOOKS = [None, "allreduce", "bf16_compress", "powersgd(rank=1)", "quant8"]
SEED = threading.Lock()


class Experts(nn.Module):
    """Three experts and a frozen one. The model uses those in ``chosen``. The first weight is shared with ``twin``."""

    def __init__(self) -> None:
        super().__init__()
        with SEED:  # members are threads, which share torch's generator
            torch.manual_seed(0)
            self.frozen = nn.Linear(8, 8).requires_grad_(False)
            self.experts = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])
            self.twin = nn.Linear(8, 8, bias=False)
        self.twin.weight = self.experts[0].weight

    def forward(self, x: torch.Tensor, chosen: tuple[int, ...]) -> torch.Tensor:
        return sum((self.experts[k](self.frozen(x)).square().mean() for k in chosen), torch.zeros(()))


def batch(step: int) -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(step), dtype=torch.float32)


def gradients(module: Experts) -> dict[str, torch.Tensor | None]:
    return {n: None if p.grad is None else p.grad.clone() for n, p in module.named_parameters() if p.requires_grad}


def local(chosen: tuple[int, ...], step: int = 0) -> dict[str, torch.Tensor]:
    """Return this choice's gradients of a fresh model, with zeros for an unused parameter."""
    module = Experts()
    module(batch(step), chosen).backward()
    return {
        n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in module.named_parameters() if p.requires_grad
    }


def in_cluster(bodies: dict[str, Callable[[SimulatedManager], Any]], **options: Any) -> dict[str, Any]:
    with SimulatedCluster(**options) as cluster:
        return cluster.run(bodies)


def equal(a: dict[str, torch.Tensor | None], b: dict[str, torch.Tensor | None]) -> bool:
    pairs = ((a[n], b[n]) for n in a)
    return all(x is y or (x is not None and y is not None and torch.equal(x, y)) for x, y in pairs)


def one_step(hook: str | None, chosen: tuple[int, ...], **options: Any) -> Callable[[SimulatedManager], Any]:
    def body(manager: SimulatedManager) -> Any:
        module = Experts()
        model = DistributedDataParallel(manager, module, hook=hook, **options)
        manager.start_quorum()
        model(batch(0), chosen).backward()
        assert manager.should_commit()
        return gradients(module)

    return body


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("view", [False, True])
def test_all_members_get_the_mean_and_an_unused_one_keeps_none(hook: str | None, view: bool) -> None:
    options = {"gradient_as_bucket_view": view, "bucket_cap_mb": 0.0003}
    found = in_cluster({"a": one_step(hook, (0,), **options), "b": one_step(hook, (1,), **options)})
    assert equal(found["a"], found["b"])
    mean = {n: (x + y) / 2 for (n, x), y in zip(local((0,)).items(), local((1,)).values(), strict=True)}
    for name, gradient in found["a"].items():
        if name.startswith("experts.2"):
            assert gradient is None, "no member used it"
        elif hook is None or hook == "allreduce":
            torch.testing.assert_close(gradient, mean[name])
        else:
            assert gradient is not None
            assert gradient.norm() > 0


@pytest.mark.parametrize("hook", HOOKS)
def test_members_stay_equal_over_steps_with_changing_experts(hook: str | None) -> None:
    def body(manager: SimulatedManager) -> Any:
        me, module = "abc".index(manager.name), Experts()
        model = DistributedDataParallel(manager, module, hook=hook, bucket_cap_mb=0.0003)
        optimizer = OptimizerWrapper(manager, torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9))
        states = []
        for step in range(6):
            optimizer.zero_grad(set_to_none=step % 2 == 0)  # zeros in .grad do not count as used
            with model.no_sync():  # parameters used here count in the averaged backward
                model(batch(step + me), ((step + me) % 3,)).backward()
            model(batch(step), (step % 2,)).backward()
            assert optimizer.step()
            states.append([p.detach().clone() for p in module.parameters()])
        return states

    found = in_cluster(dict.fromkeys("abc", body))
    for name in "bc":
        for mine, others in zip(found["a"], found[name], strict=True):
            assert all(torch.equal(x, y) for x, y in zip(mine, others, strict=True))


@pytest.mark.parametrize("hook", [None, "powersgd(rank=1)", "quant8"])
@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize(("set_to_none", "backwards"), [(True, 1), (False, 1), (True, 2)])
def test_members_that_die_and_heal(hook: str | None, asynchronous: bool, set_to_none: bool, backwards: int) -> None:
    """The only member that uses an expert dies within a step. Its successor heals while the others leave that expert
    unused.
    """
    states: dict[str, dict[int, list[torch.Tensor]]] = {name: {} for name in "abc"}
    died: list[int] = []

    def life(manager: SimulatedManager) -> None:
        me, module = "abc".index(manager.name), Experts()
        model = DistributedDataParallel(manager, module, hook=hook, bucket_cap_mb=0.0003)
        inner = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        optimizer = OptimizerWrapper(manager, inner)
        manager.register_state_dict_fn("model", module.load_state_dict, module.state_dict)
        manager.register_state_dict_fn("optim", inner.load_state_dict, inner.state_dict)
        while manager.current_step() < 8:
            optimizer.zero_grad(set_to_none)
            for _ in range(backwards):
                model(batch(me), (me,)).backward()
            if optimizer.step():
                states[manager.name][manager.current_step()] = [p.detach().clone() for p in module.parameters()]

    def lives(manager: SimulatedManager) -> None:
        try:
            life(manager)
        except SimulatedDeath:
            states["c"].clear()
            life(manager.cluster.join("c"))

    def dying(manager: SimulatedManager, number: int) -> None:
        if manager.name == "c" and manager.current_step() == 3 and number == 1 and not died:
            died.append(number)
            manager.die(return_at=5)

    with SimulatedCluster(async_quorum=asynchronous) as cluster:
        cluster.on_collective = dying
        cluster.run(dict.fromkeys("abc", lives))
    assert died
    assert min(states["c"]) == 6
    for name in "bc":
        for step, mine in states[name].items():
            assert all(torch.equal(x, y) for x, y in zip(mine, states["a"][step], strict=True)), (name, step)


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("view", [False, True])
def test_a_spare_learns_the_map_and_adds_nothing_to_it(hook: str | None, view: bool) -> None:
    bodies = {name: one_step(hook, (i,), gradient_as_bucket_view=view) for i, name in enumerate("ab")}
    found = in_cluster(bodies, max_participants=1)
    assert equal(found["a"], found["b"])
    assert found["b"]["experts.1.weight"] is None, "only the spare used it"


def test_a_backward_that_raised_leaves_no_map_behind() -> None:
    """Parameters that it used count in the next averaged backward, as over torch's DDP."""

    def body(manager: SimulatedManager) -> Any:
        module = Experts()
        model = DistributedDataParallel(manager, module, bucket_cap_mb=0.0003)
        manager.start_quorum()
        loss = model(batch(0), (0,))
        removable = module.experts[0].bias.register_hook(_raise)
        with pytest.raises(ArithmeticError):
            loss.backward()
        removable.remove()
        manager.should_commit()
        module.zero_grad()
        manager.start_quorum()
        model(batch(0), (1,)).backward()
        manager.should_commit()
        return gradients(module)

    found = in_cluster({"a": body, "b": body})
    assert equal(found["a"], found["b"])
    assert found["a"]["experts.2.weight"] is None


def _raise(gradient: torch.Tensor) -> None:
    raise ArithmeticError("half way")


def test_ignored_parameters_have_no_place_in_the_map() -> None:
    def body(manager: SimulatedManager) -> Any:
        me, module = "ab".index(manager.name), Experts()
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["experts.0.bias"])
        model = DistributedDataParallel(manager, module)
        manager.start_quorum()
        model(batch(0), (me,)).backward()
        return gradients(module)

    found = in_cluster({"a": body, "b": body})
    for gradients_ in found.values():
        gradients_.pop("experts.0.bias")
    assert equal(found["a"], found["b"])


class Scaled(nn.Module):
    """Has a parameter in the outermost module, and one with two names."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2, dtype=torch.float32))
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x * self.scale))


@pytest.mark.parametrize("ignored", [["scale"], [".scale"], ["first.weight"], ["first.weight", "second.weight"]])
def test_the_map_has_the_parameters_of_ddps_own_list(ignored: list[str]) -> None:
    """DDP does not find "scale" in the outermost module, and reduces a shared parameter unless both names are ignored."""
    with SimulatedCluster() as cluster:
        manager, module = cluster.join("a"), Scaled()
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ignored)
        model = DistributedDataParallel(manager, module)
        assert [id(p) for _, p in averaged_params(model)] == [id(p) for p in model._build_params_for_reducer()[0]]
        assert {name for name, _ in averaged_params(model)} <= {name for name, _ in module.named_parameters()}
        manager.start_quorum()
        model(torch.ones(1, 2, dtype=torch.float32)).sum().backward()
        assert manager.should_commit()


def test_a_dropped_model_leaves_its_parameters_alone() -> None:
    param = nn.Parameter(torch.ones(2))
    used = UsedParams([param])
    param.sum().backward()
    assert used.map(torch.device("cpu")).tolist() == [1]
    assert len(param._post_accumulate_grad_hooks) == 1
    del used
    assert not param._post_accumulate_grad_hooks


def test_join_is_refused() -> None:
    with SimulatedCluster() as cluster:
        model = DistributedDataParallel(cluster.join("a"), nn.Linear(2, 2))
        with pytest.raises(HookNotSupportedError, match="fixed set of ranks"):
            model.join()


@pytest.mark.parametrize("option", [{"broadcast_buffers": True}, {"delay_all_reduce_named_params": [("weight", None)]}])
def test_other_collectives_of_ddp_are_refused(option: dict[str, Any]) -> None:
    with SimulatedCluster() as cluster, pytest.raises(HookConfigError, match="over its own process group"):
        DistributedDataParallel(cluster.join("a"), nn.Linear(2, 2), **option)


def test_buffers_reach_no_other_member() -> None:
    """DDP would broadcast them before each forward. They belong to the member until it heals."""

    def body(manager: SimulatedManager) -> float:
        module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        model = DistributedDataParallel(manager, module)
        manager.start_quorum()
        model(torch.full((4, 2), float(ord(manager.name)))).sum().backward()
        return float(module[1].running_mean.sum())

    found = in_cluster({"a": body, "b": body})
    assert found["a"] != found["b"]


def test_buckets_that_ddp_skips_are_refused() -> None:
    with SimulatedCluster() as cluster, pytest.raises(HookConfigError, match="skip the last bucket"):
        DistributedDataParallel(cluster.join("a"), nn.Linear(2, 2), skip_all_reduce_unused_params=True)


@pytest.mark.parametrize("hook", [None, "powersgd(rank=1)"])
def test_a_dropped_model_is_freed_without_a_garbage_collection(hook: str | None) -> None:
    def dropped(manager: SimulatedManager) -> list[weakref.ref[Any]]:
        model = DistributedDataParallel(manager, nn.Linear(8, 8), hook=hook)
        manager.start_quorum()
        model(torch.ones(1, 8)).sum().backward()
        assert manager.should_commit()
        return [weakref.ref(part) for part in (model, model.module.weight, model.handle) if part is not None]

    with SimulatedCluster() as cluster:
        manager = cluster.join("a")
        dropped(manager)
        gc.collect()
        gc.disable()
        try:
            assert [reference() for reference in dropped(manager)] == [None] * (3 if hook else 2)
        finally:
            gc.enable()
