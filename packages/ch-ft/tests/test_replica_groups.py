"""``attach(fsdp2_model, hook, manager=...)`` with fully_shard inside a replica group and a manager
between the groups.
"""

import gc
import os
import subprocess
import sys
import textwrap
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import ch_ft
import commhooks
from ch_ft import OptimizerWrapper
from ch_testing import SimulatedCluster, SimulatedDeath, SimulatedManager
from commhooks import AttachError, HookConfigError, HookNotSupportedError, RankMismatchError

pytest.importorskip("ch_fsdp")

POWERSGD = "powersgd(rank=2, min_compression_rate=1)"
QUANT = "quant4(block=16, error_feedback=True)"  # one more collective, which tells the contributors
COLLECTIVES = 8  # in a step with PowerSGD: fingerprints, P and Q of three layers, the status
BUILDING = threading.Lock()  # members are threads, and torch makes meshes and shards on one thread at a time


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[None]:
    """Make each replica group one rank. All members share a process and its group of one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.0005)
    yield
    sys.setswitchinterval(before)
    dist.destroy_process_group()


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    linear, tanh = nn.Linear, nn.Tanh
    return nn.Sequential(linear(24, 24), tanh(), linear(24, 24), tanh(), linear(24, 24))


def sharded(module: nn.Module, **options: Any) -> nn.Module:
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("shard",))
    for layer in module.children():
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh, **options)
    return fully_shard(module, mesh=mesh, **options)


def batch(name: str, step: int) -> torch.Tensor:
    return torch.randn(4, 24, generator=torch.Generator().manual_seed(1000 * step + ord(name)))


def local(tensor: Any) -> torch.Tensor:
    return getattr(tensor, "_local_tensor", tensor).detach().clone()


def vector(tensors: Any) -> torch.Tensor:
    return torch.cat([local(t).reshape(-1) for t in tensors])


class Member:
    """A sharded model with a hook over one manager."""

    def __init__(self, manager: SimulatedManager, hook: Any, module: nn.Module | None = None, **options: Any) -> None:
        with BUILDING:
            self.model = sharded(module if module is not None else net())
            self.handle = commhooks.attach(self.model, hook, manager=manager, **options)
        self.manager = manager
        inner = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self.optimizer = OptimizerWrapper(manager, inner)
        manager.register_state_dict_fn("model", self._load, lambda: vector(self.model.parameters()))
        manager.register_state_dict_fn("optim", self._load_momentum, lambda: self._momentum())

    def _load(self, saved: torch.Tensor) -> None:
        for p in self.model.parameters():
            part, saved = saved[: p.numel()], saved[p.numel() :]
            p._local_tensor.detach().copy_(part.view_as(p._local_tensor))

    def _momentum(self) -> list[torch.Tensor]:
        state = self.optimizer.optim.state
        return [local(state[p]["momentum_buffer"]) for p in self.model.parameters() if p in state]

    def _load_momentum(self, saved: list[torch.Tensor]) -> None:
        for p, buffer in zip(self.model.parameters(), saved, strict=False):
            ours = torch.distributed.tensor.DTensor.from_local(buffer, p.device_mesh, p.placements)
            self.optimizer.optim.state[p]["momentum_buffer"] = ours

    def step(self, backwards: int = 1) -> bool:
        step = self.manager.current_step()
        self.optimizer.zero_grad()
        for number in range(backwards):
            self.model(batch(self.manager.name, 100 * number + step)).pow(2).mean().backward()
        return self.optimizer.step()

    def entries(self, field: str) -> dict[str, torch.Tensor]:
        return {name: t.clone() for name, which, t in self.handle.state.entries() if which == field}


def history(manager: SimulatedManager, hook: str, steps: int, **options: Any) -> dict[int, tuple[Any, ...]]:
    """Train. Return parameters, Q and residual after each step."""
    member, states = Member(manager, hook, **options), {}
    while manager.current_step() < steps:
        if member.step():
            q, residual = member.entries("q"), member.entries("residual")
            states[manager.current_step()] = (vector(member.model.parameters()), q, residual)
    assert member.handle.stats()["compressed_steps"] > 0 or not hook.startswith("powersgd")
    return states


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    return one.keys() == other.keys() and all(torch.equal(t, other[name]) for name, t in one.items())


@pytest.mark.timeout(60)
def test_means_are_over_the_members_of_the_step() -> None:
    """The mean never covers the members at attach. Such a mean, over a group of torchft's, halved the gradients."""

    def body(manager: SimulatedManager) -> list[tuple[int, torch.Tensor]]:
        member, found = Member(manager, "allreduce"), []
        for step in range(4):
            if manager.name == "b" and step == 2:
                break
            manager.start_quorum()
            member.model.zero_grad()
            member.model(torch.full((1, 24), float(ord(manager.name)))).sum().backward()
            last, first = member.model[4].bias.grad, member.model[0].weight.grad
            found.append((manager.num_participants(), local(last), local(first)))
            assert manager.should_commit()
        return found

    with SimulatedCluster() as cluster:
        found = cluster.run(dict.fromkeys("ab", body))
    weights = []
    for name in "ab":
        alone = net()
        alone(torch.full((1, 24), float(ord(name)))).sum().backward()
        weights.append(alone[0].weight.grad)
    both = (weights[0] + weights[1]) / 2
    for step, (members, bias, weight) in enumerate(found["a"]):
        assert members == (2 if step < 2 else 1)
        assert torch.equal(bias, torch.ones(24))
        torch.testing.assert_close(weight, both if step < 2 else weights[0])


@pytest.mark.full
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("hook", "number"), [*((POWERSGD, n) for n in range(COLLECTIVES)), *((QUANT, n) for n in (1, 2, 4))]
)
def test_a_death_inside_a_step_equals_a_death_before_it(hook: str, number: int) -> None:
    """Survivors have the same parameters, Q and residual to the bit. They drop the attempt and try it again."""

    def dies(manager: SimulatedManager, n: int) -> None:
        if manager.name == "b" and manager.current_step() == 3 and n == number:
            manager.die()

    def lives(manager: SimulatedManager) -> Any:
        return history(manager, hook, 7)

    with SimulatedCluster() as cluster:
        cluster.on_collective = dies
        inside, tried = cluster.run(dict.fromkeys("abc", lives)), cluster.history
    with SimulatedCluster() as cluster:
        leaves = {"a": lives, "b": lambda manager: history(manager, hook, 3), "c": lives}
        before, straight = cluster.run(leaves), cluster.history
    assert len(tried) == len(straight) + 1
    for name in "ac":
        assert inside[name].keys() == before[name].keys()
        for step, state in inside[name].items():
            assert all(map(same, state, before[name][step])), (name, step)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("async_quorum", [True, pytest.param(False, marks=pytest.mark.full)])
def test_a_newcomer_heals(async_quorum: bool) -> None:
    """The new member gets parameters and Q from the others, starts without a residual, and stays equal to them."""
    reborn: dict[int, Any] = {}

    def collective(manager: SimulatedManager, number: int) -> None:
        if manager.name == "b" and manager.current_step() == 3 and number == 2 and not reborn:
            manager.die(return_at=6)

    def lives(manager: SimulatedManager) -> Any:
        try:
            return history(manager, POWERSGD, 12)
        except SimulatedDeath:
            manager = manager.cluster.join(manager.name)
            reborn.update(history(manager, POWERSGD, 12, module=net(seed=7)))
            return None

    with SimulatedCluster(async_quorum=async_quorum) as cluster:
        cluster.on_collective = collective
        found = cluster.run(dict.fromkeys("ab", lives))
        healing = [names for step, names in cluster.history if step == 6]
    assert healing == [["a"] if async_quorum else ["a", "b"]]
    assert min(reborn) == 7
    for step, (params, q, residual) in reborn.items():
        assert same(params, found["a"][step][0]), step
        assert q
        assert same(q, found["a"][step][1]), step
        if async_quorum and step == 7:
            assert not any(t.any() for t in residual.values())


@pytest.mark.timeout(60)
def test_backwards_of_one_attempt_are_committed_or_dropped_together() -> None:
    """Their gradients add up. After a rejected attempt, hook and parameters are as if its batches did not exist."""

    def train(manager: SimulatedManager, vetoed: int) -> tuple[Any, ...]:
        member = Member(manager, POWERSGD)
        member.step(2)
        before = vector(member.model.parameters()), member.entries("q"), member.entries("residual")
        if vetoed:
            manager.start_quorum()
            member.model.zero_grad()
            member.model(batch("z", 5)).sum().backward()
            manager.report_error(RuntimeError("vetoed"))
            assert not manager.should_commit()
        after = vector(member.model.parameters()), member.entries("q"), member.entries("residual")
        assert all(map(same, before, after))
        member.step(2)
        return vector(member.model.parameters()), member.entries("q"), member.entries("residual")

    results = []
    for vetoed in (0, 1):
        with SimulatedCluster() as cluster:
            results.append(cluster.run(dict.fromkeys("ab", lambda m, v=vetoed: train(m, v))))
    for name in "ab":
        assert all(map(same, results[0][name], results[1][name]))
    assert same(results[0]["a"][0], results[0]["b"][0])


@pytest.mark.timeout(60)
def test_members_that_differ_get_an_error_before_any_gradient_is_sent() -> None:
    def body(manager: SimulatedManager) -> str:
        member = Member(manager, "allreduce" if manager.name == "a" else "bf16_compress")
        manager.start_quorum()
        with pytest.raises(RankMismatchError) as caught:
            member.model(batch("a", 0)).sum().backward()
        assert not manager.should_commit()
        return str(caught.value)

    with SimulatedCluster() as cluster:
        told = cluster.run(dict.fromkeys("ab", body))
    assert "hook: here allreduce" in told["a"]
    assert "hook: here bf16_compress" in told["b"]


@pytest.mark.timeout(60)
def test_a_parameter_thawed_on_one_member_only_raises() -> None:
    """Different sizes would make gloo end the process, also on healthy members."""

    def body(manager: SimulatedManager) -> bool:
        module = net()
        module[2].requires_grad_(False)
        member = Member(manager, "allreduce", module)
        assert member.step()
        if manager.name == "b":
            member.model[2].requires_grad_(True)
        manager.start_quorum()
        with pytest.raises(RankMismatchError, match="parameters: here"):
            member.model(batch("a", 0)).sum().backward()
        voted_down = not manager.should_commit()
        member.model[2].requires_grad_(True)
        return voted_down and member.step()

    with SimulatedCluster() as cluster:
        assert all(cluster.run(dict.fromkeys("ab", body)).values())


class WithoutLast(nn.Sequential):
    """Leaves out its last layer. FSDP2 then writes other gradients before the first reduction of a backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in list(self)[:-1]:
            x = layer(x)
        return x


@pytest.mark.timeout(60)
def test_gradients_dropped_after_the_vote_roll_their_attempt_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def in_doubt(gone: int, had: int) -> None:
        raise AssertionError(f"{gone} of {had} gradients seem to be gone, but all were dropped")

    monkeypatch.setattr("commhooks.adapters.optimizer_watch._partly_gone", in_doubt)

    def body(manager: SimulatedManager) -> list[torch.Tensor]:
        model = WithoutLast(*net())
        with BUILDING:
            sharded(model)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            handle = commhooks.attach(model, POWERSGD, manager=manager, optimizer=optimizer)
        residuals: list[torch.Tensor] = []
        for step in range(4):
            optimizer.zero_grad()
            manager.start_quorum()
            model(batch(manager.name, step)).square().mean().backward()
            if step:
                residuals.append(vector(t for _, field, t in handle.state.entries() if field == "residual"))
            assert manager.should_commit()
            if step != 2:
                optimizer.step()
        handle.commit()
        residuals.append(vector(t for _, field, t in handle.state.entries() if field == "residual"))
        return residuals

    with SimulatedCluster() as cluster:
        for _, before, dropped, after in cluster.run(dict.fromkeys("ab", body)).values():
            assert torch.equal(before, dropped)
            assert not torch.equal(before, after)


class Broken(commhooks.Plain):
    """Raises in the second bucket while armed."""

    name = "broken"
    armed = False

    def run(self, bucket: Any, ctx: Any) -> Any:
        if self.armed and bucket.index == 1:
            raise ValueError("broken here")
        yield from super().run(bucket, ctx)


@pytest.mark.timeout(60)
def test_an_error_of_one_members_hook_is_raised_there_and_committed_nowhere() -> None:
    def body(manager: SimulatedManager) -> list[str]:
        broken, found = Broken(), []
        member = Member(manager, broken, verify_ranks=False)
        for attempt in range(3):
            broken.armed = attempt == 1 and manager.name == "b"
            manager.start_quorum()
            try:
                member.model(batch("a", 0)).pow(2).mean().backward()
            except ValueError as error:
                found.append(str(error))
            found.append(str(manager.should_commit()))
        return found

    with SimulatedCluster() as cluster:
        found = cluster.run(dict.fromkeys("ab", body))
    assert found["a"] == ["True", "False", "True"], found
    assert found["b"] == ["True", "broken here", "False", "True"]


@pytest.mark.timeout(60)
def test_a_detached_model_averages_plainly_over_the_members() -> None:
    def body(manager: SimulatedManager) -> tuple[torch.Tensor, torch.Tensor]:
        member = Member(manager, POWERSGD)
        assert member.step()
        member.handle.detach()
        manager.start_quorum()
        member.model.zero_grad()
        single = net()
        with torch.no_grad():
            for ours, theirs in zip(single.parameters(), member.model.parameters(), strict=True):
                ours.copy_(local(theirs))
        member.model(batch(manager.name, 1)).sum().backward()
        single(batch(manager.name, 1)).sum().backward()
        assert manager.should_commit()
        with BUILDING:
            again = commhooks.attach(member.model, POWERSGD, manager=manager)
        assert member.step()
        assert again.stats()["compressed_steps"] == 1
        return local(member.model[0].weight), single[0].weight.grad

    with SimulatedCluster() as cluster:
        found = cluster.run(dict.fromkeys("ab", body))
    assert torch.equal(found["a"][0], found["b"][0])


def test_impossible_combinations_are_refused() -> None:
    with SimulatedCluster() as cluster:
        manager = cluster.join("a")
        model = sharded(net())
        with pytest.raises(AttachError, match="exclude each other"):
            commhooks.attach(model, "allreduce", manager=manager, process_group=dist.group.WORLD)
        with pytest.raises(HookConfigError, match="axis='shard' reduces inside a replica group"):
            commhooks.attach(model, "allreduce", manager=manager, axis="shard")
        with pytest.raises(AttachError, match="manager=object: expected a manager of groups of ranks"):
            commhooks.attach(model, "allreduce", manager=object())
        other = cluster.join("b")
        del other.process_group
        with pytest.raises(HookNotSupportedError, match="shows no process group"):
            commhooks.attach(model, "bf16_compress(accumulate='fp32')", manager=other)
        with pytest.raises(AttachError, match=r"ch_ft.DistributedDataParallel\(manager, module\)"):
            commhooks.attach(DistributedDataParallel(net()), "allreduce", manager=manager)
        with pytest.raises(AttachError, match="attach to that without manager="):
            commhooks.attach(ch_ft.DistributedDataParallel(manager, net()), "allreduce", manager=manager)
        assert not commhooks.attach(model, "allreduce", manager=manager).detach()


@pytest.mark.timeout(60)
def test_gradients_that_would_outlive_a_dropped_attempt_are_refused() -> None:
    with SimulatedCluster() as cluster:
        member = Member(cluster.join("a"), "allreduce")
        member.model.set_requires_all_reduce(False)
        member.optimizer.zero_grad()
        with pytest.raises(HookNotSupportedError, match="set_requires_gradient_sync"):
            member.model(batch("a", 0)).sum().backward()
        assert not member.optimizer.step()
        member.model.set_requires_all_reduce(True)
        assert member.step()


def test_a_mesh_with_replicas_is_refused() -> None:
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard"))
    model = fully_shard(net(), mesh=mesh)
    with SimulatedCluster() as cluster, pytest.raises(HookNotSupportedError, match="with manager= the replicas are"):
        commhooks.attach(model, "allreduce", manager=cluster.join("a"))


@pytest.mark.full
@pytest.mark.timeout(60)
def test_without_ch_ft_the_error_names_the_package() -> None:
    code = """
        import torch, torch.distributed as dist
        import commhooks
        from torch.distributed.fsdp import fully_shard
        from torchft.manager import Manager
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        manager = Manager.__new__(Manager)  # its class decides
        try:
            commhooks.attach(fully_shard(torch.nn.Linear(4, 4)), "allreduce", manager=manager)
        except commhooks.AttachError as error:
            assert "comes with ch-ft, not installed here" in str(error), error
        else:
            raise SystemExit("no error")
    """
    environment = {**os.environ, "COMMHOOKS_DISABLE": "ch-ft"}
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=55, env=environment)
    assert done.returncode == 0, done.stderr


def test_a_dropped_model_is_freed_while_its_manager_lives() -> None:
    def dropped(manager: SimulatedManager) -> list[weakref.ref[Any]]:
        model = sharded(net())
        handle = commhooks.attach(model, POWERSGD, manager=manager)
        manager.start_quorum()
        model(batch("a", 0)).sum().backward()
        assert manager.should_commit()
        return [weakref.ref(part) for part in (model, handle)]

    with SimulatedCluster() as cluster:
        manager = cluster.join("a")
        found = dropped(manager)
        gc.collect()
        assert [part() for part in found] == [None, None]
