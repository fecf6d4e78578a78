"""Manager-backed models over the simulator: means, commits and rollbacks, heals, refusals."""

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import commhooks
from ch_ft import DistributedDataParallel, ManagerTransport, OptimizerWrapper, PureDistributedDataParallel
from ch_ft.transport import collectives_for
from ch_testing import SimulatedCluster, SimulatedManager
from ch_wrappers import WireCast
from commhooks import (
    AllReduce,
    AttachError,
    Bucket,
    HookConfigError,
    HookNotSupportedError,
    Plain,
    RankMismatchError,
    ReduceScatter,
    Reduction,
    Stages,
    StepContext,
)

from .stages import TwoStage

CAP = 0.0005  # MB, which gives three buckets


NET = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 16), torch.nn.Linear(16, 1))


def net() -> torch.nn.Module:
    """Return a copy with equal weights on every member, because threads share the random number generator."""
    return copy.deepcopy(NET)


def grads(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.reshape(-1).double() for p in model.parameters() if p.grad is not None])


def data(name: str, step: int = 0) -> torch.Tensor:
    return torch.randn(4, 16, generator=torch.Generator().manual_seed(step * 1000 + ord(name)))


def local_gradient(name: str) -> torch.Tensor:
    module = net()
    module(data(name)).pow(2).mean().backward()
    return grads(module)


def build(kind: str, manager: SimulatedManager) -> torch.nn.Module:
    if kind == "pure":
        return PureDistributedDataParallel(manager, net())
    hook = {"ddp": None, "attached": Plain(), "bf16": WireCast(Plain(), "bf16")}[kind]
    return DistributedDataParallel(manager, net(), hook=hook, bucket_cap_mb=CAP)


def test_one_member_prints_live_lines(capsys: pytest.CaptureFixture[str]) -> None:
    """Each member has rank 0 until the first quorum tells its rank."""

    def member(manager: SimulatedManager) -> None:
        model = DistributedDataParallel(manager, net(), hook=Plain(), bucket_cap_mb=CAP)
        optimizer = OptimizerWrapper(manager, torch.optim.SGD(model.parameters(), lr=0.01))
        assert model.handle is not None
        with model.handle.live(1):
            for step in range(3):
                optimizer.zero_grad()
                model(data(manager.name, step)).pow(2).mean().backward()
                optimizer.step()

    with SimulatedCluster() as cluster:
        cluster.run(dict.fromkeys("abc", member))
    assert capsys.readouterr().err.count("each; sent") == 3


@pytest.mark.parametrize("kind", ["ddp", "pure", "attached", "bf16"])
def test_gradients_are_the_mean_over_the_participants(kind: str) -> None:
    expected = torch.stack([local_gradient(name) for name in "abc"]).mean(0)

    def body(manager: SimulatedManager) -> torch.Tensor:
        model = build(kind, manager)
        manager.start_quorum()
        model(data(manager.name)).pow(2).mean().backward()
        return grads(model)

    with SimulatedCluster() as cluster:
        results = cluster.run(dict.fromkeys("abc", body))
    tolerance = {"rtol": 2e-2, "atol": 1e-3} if kind == "bf16" else {"rtol": 1e-5, "atol": 1e-7}
    for gradient in results.values():
        torch.testing.assert_close(gradient, expected, **tolerance)
        assert torch.equal(gradient, results["a"])


@pytest.mark.parametrize("kind", ["ddp", "pure", "attached"])
def test_a_healing_member_adds_nothing_to_the_mean(kind: str) -> None:
    expected = torch.stack([local_gradient(name) for name in "ab"]).mean(0)

    def body(manager: SimulatedManager) -> torch.Tensor:
        model = build(kind, manager)
        manager.register_state_dict_fn("model", model.load_state_dict, model.state_dict)
        if manager.name != "c":
            manager._step = 3
        manager.start_quorum()
        model(data(manager.name)).pow(2).mean().backward()
        assert manager.num_participants() == 2
        assert manager.should_commit()
        return grads(model)

    with SimulatedCluster() as cluster:
        results = cluster.run(dict.fromkeys("abc", body))
    for gradient in results.values():
        torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("kind", ["plain", "pure", "attached", "wire"])
def test_fp16_gradients_of_40_000_do_not_overflow(kind: str) -> None:
    dtype = torch.float32 if kind == "wire" else torch.float16

    def body(manager: SimulatedManager) -> torch.Tensor:
        module = torch.nn.Linear(4, 1, bias=False).to(dtype)
        if kind == "pure":
            model: torch.nn.Module = PureDistributedDataParallel(manager, module)
        else:
            hook = {"plain": None, "attached": Plain(), "wire": WireCast(Plain(), "fp16")}[kind]
            model = DistributedDataParallel(manager, module, hook=hook)
        manager.start_quorum()
        (model(torch.ones(1, 4, dtype=dtype)).sum() * 40_000).backward()
        return grads(model)

    with SimulatedCluster() as cluster:
        results = cluster.run(dict.fromkeys("ab", body))
    assert all(gradient.eq(40_000).all() for gradient in results.values())


# -- commit and rollback


def trainer(steps: int, seen: dict[str, Any], before: Callable[[SimulatedManager], None] | None = None) -> Any:
    """Return the body of a member that trains with :class:`TwoStage` until ``steps`` are committed."""

    def body(manager: SimulatedManager) -> dict[str, torch.Tensor]:
        model = DistributedDataParallel(manager, net(), hook=TwoStage(), bucket_cap_mb=CAP)
        optimizer = OptimizerWrapper(manager, torch.optim.SGD(model.parameters(), lr=1e-4))
        manager.register_state_dict_fn("model", model.load_state_dict, model.state_dict)
        while manager.current_step() < steps:
            optimizer.zero_grad()
            if before is not None:
                before(manager)
            model(10 * data(manager.name, manager.current_step())).pow(2).mean().backward()
            optimizer.step()
        assert model.handle is not None
        seen[manager.name] = optimizer.drops
        return {f"{name}.{field}": t.clone() for name, field, t in model.handle.state.entries()}

    return body


def test_a_step_voted_down_leaves_the_state_as_it_was() -> None:
    voted: set[tuple[str, int]] = set()

    def veto(manager: SimulatedManager) -> None:
        if manager.current_step() == 3 and (manager.name, 3) not in voted:
            voted.add((manager.name, 3))
            manager.num_participants()
            manager.report_error(RuntimeError("this batch is bad"))

    drops: dict[str, int] = {}
    with SimulatedCluster() as cluster:
        clean = cluster.run(dict.fromkeys("ab", trainer(6, drops)))
    with SimulatedCluster() as cluster:
        vetoed = cluster.run(dict.fromkeys("ab", trainer(6, drops, veto)))
    assert drops == {"a": 1, "b": 1}
    for name in "ab":
        assert clean[name].keys() == vetoed[name].keys()
        assert all(torch.equal(clean[name][key], vetoed[name][key]) for key in clean[name])
        assert any(t.ne(0).any() for key, t in clean[name].items() if key.endswith("residual"))


@pytest.mark.parametrize("async_quorum", [True, False])
def test_a_healed_member_has_the_shared_state_and_no_residual(async_quorum: bool) -> None:
    """In both kinds of quorum the new member ends its first step with the others' shared state."""

    def body(manager: SimulatedManager) -> dict[str, torch.Tensor]:
        model = DistributedDataParallel(manager, net(), hook=TwoStage(), bucket_cap_mb=CAP)
        optimizer = OptimizerWrapper(manager, torch.optim.SGD(model.parameters(), lr=1e-4))
        manager.register_state_dict_fn("model", model.load_state_dict, model.state_dict)
        for _ in range(1 if manager.name == "c" else 4):
            optimizer.zero_grad()
            model(10 * data(manager.name, manager.current_step())).pow(2).mean().backward()
            assert optimizer.step()
        assert model.handle is not None
        return {f"{name}.{field}": t.clone() for name, field, t in model.handle.state.entries()}

    with SimulatedCluster(async_quorum=async_quorum) as cluster:
        cluster._returning["c"] = 3  # the quorum waits for c at step 3, and c takes part in that step only
        results = cluster.run(dict.fromkeys("abc", body))
        assert cluster.history[-1] == (3, ["a", "b"] if async_quorum else ["a", "b", "c"])
    shared = [key for key in results["a"] if key.endswith("seen")]
    assert shared
    assert all(torch.equal(results["a"][key], results["c"][key]) for key in shared)
    residuals = {key for key in results["c"] if key.endswith("residual")}
    assert residuals == (set() if async_quorum else {key for key in results["a"] if key.endswith("residual")})


def test_a_spare_keeps_its_residual_and_follows_the_shared_state() -> None:
    with SimulatedCluster(max_participants=2) as cluster:
        results = cluster.run(dict.fromkeys("abc", trainer(3, {})))
    for key, tensor in results["a"].items():
        if key.endswith("seen"):
            assert torch.equal(tensor, results["c"][key])
    assert not any(key.endswith("residual") for key in results["c"])


def test_without_the_wrapper_the_step_counter_decides() -> None:
    """Torchft's own optimizer wrapper does not inform the hook. The next step asks the manager for the last outcome."""
    voted: list[int] = []

    def body(manager: SimulatedManager) -> dict[str, torch.Tensor]:
        model = DistributedDataParallel(manager, net(), hook=TwoStage(), bucket_cap_mb=CAP)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        while manager.current_step() < 4:
            optimizer.zero_grad()
            manager.start_quorum()
            model(10 * data("a", manager.current_step())).pow(2).mean().backward()
            if manager.current_step() == 2 and not voted:
                voted.append(2)
                manager.report_error(RuntimeError("no"))
            if manager.should_commit():
                optimizer.step()
        assert model.handle is not None
        model.handle.commit()
        return {f"{name}.{field}": t.clone() for name, field, t in model.handle.state.entries()}

    with SimulatedCluster() as cluster:
        lazily = cluster.run({"a": body})["a"]
    with SimulatedCluster() as cluster:
        told = cluster.run({"a": trainer(4, {})})["a"]
    assert voted
    assert lazily.keys() == told.keys()
    assert all(torch.equal(lazily[key], told[key]) for key in told)


def test_only_a_committed_step_moves_the_schedule() -> None:
    def body(manager: SimulatedManager) -> float:
        weight = torch.nn.Parameter(torch.ones(1))
        inner = torch.optim.SGD([weight], lr=1.0)
        schedule = torch.optim.lr_scheduler.StepLR(inner, 1, gamma=0.5)
        optimizer = OptimizerWrapper(manager, inner, schedulers=[schedule])
        for bad in (False, True, False):
            optimizer.zero_grad()
            weight.grad = torch.zeros(1)
            if bad:
                manager.report_error(RuntimeError("bad batch"))
            assert optimizer.step() is not bad
            assert optimizer.committed is not bad
        return float(schedule.get_last_lr()[0])

    with SimulatedCluster() as cluster:
        assert cluster.run({"a": body}) == {"a": 0.25}


# -- errors


class Failing(Reduction):
    """Raises on one member between its two collectives."""

    name = "failing"

    def __init__(self, who: str) -> None:
        self.who = who

    def run(self, bucket: Bucket, ctx: StepContext) -> Stages:
        yield AllReduce(bucket.buffer)
        if self.who == "me" and bucket.device.type != "meta":
            raise ArithmeticError("too hot")
        yield AllReduce(bucket.buffer)


def test_an_error_of_one_members_reduction_is_raised_there_and_committed_nowhere() -> None:
    def body(manager: SimulatedManager) -> tuple[str, bool]:
        reduction = Failing("me" if manager.name == "b" else "others")
        model = DistributedDataParallel(manager, net(), hook=reduction, bucket_cap_mb=CAP)
        optimizer = OptimizerWrapper(manager, torch.optim.SGD(model.parameters(), lr=0.1))
        optimizer.zero_grad()
        raised = ""
        try:
            model(data(manager.name)).sum().backward()
        except ArithmeticError as error:
            raised = str(error)
        return raised, optimizer.step()

    with SimulatedCluster() as cluster:
        results = cluster.run(dict.fromkeys("abc", body))
    assert results == {"a": ("", False), "b": ("too hot", False), "c": ("", False)}


def test_members_that_disagree_get_an_error_before_any_gradient_is_sent() -> None:
    def body(manager: SimulatedManager) -> str:
        width = 16 if manager.name != "b" else 8
        module = torch.nn.Linear(width, 1)
        model = DistributedDataParallel(manager, module, hook=Plain())
        manager.start_quorum()
        with pytest.raises(RankMismatchError) as caught:
            model(torch.ones(1, width)).sum().backward()
        assert not manager.should_commit()
        return str(caught.value)

    with SimulatedCluster() as cluster:
        texts = cluster.run(dict.fromkeys("abc", body))
    assert all("parameters: here 2 tensors" in text and "bucket_cap_mb" not in text for text in texts.values())


def test_a_newcomer_that_disagrees_leaves_and_the_others_lose_one_attempt() -> None:
    def body(manager: SimulatedManager) -> int:
        newcomer = manager.name == "c"
        module = torch.nn.Linear(8 if newcomer else 16, 1)
        model = DistributedDataParallel(manager, module, hook=Plain())
        optimizer = OptimizerWrapper(manager, torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in range(1 if newcomer else 5):
            optimizer.zero_grad()
            output = model(torch.ones(1, 8 if newcomer else 16)).sum()
            if newcomer:
                with pytest.raises(RankMismatchError, match="parameters"):
                    output.backward()
                manager.die()
            output.backward()
            optimizer.step()
        return optimizer.drops

    with SimulatedCluster() as cluster:
        cluster._returning["c"] = 2
        assert cluster.run(dict.fromkeys("abc", body)) == {"a": 1, "b": 1, "c": None}


class Scattering(Reduction):
    name = "scattering"
    collectives = frozenset({"reduce_scatter"})

    def run(self, bucket: Bucket, ctx: StepContext) -> Stages:
        yield ReduceScatter(bucket.buffer, bucket.buffer[: bucket.buffer.numel() // ctx.world_size])


def test_hooks_that_a_manager_does_not_support_are_refused_by_name() -> None:
    gathering = WireCast(Plain(), "bf16", accumulate="fp32")
    with SimulatedCluster() as cluster:
        manager = cluster.join("a")
        with pytest.raises(
            HookNotSupportedError, match=r"scattering.*needs reduce_scatter, and a manager carries sums"
        ):
            DistributedDataParallel(manager, net(), hook=Scattering())
        assert collectives_for(gathering, manager) is not None
        assert collectives_for(Plain(), manager) is None
        del manager.process_group
        with pytest.raises(HookNotSupportedError, match=r"bf16_wrapper.*SimulatedManager shows no process group"):
            DistributedDataParallel(manager, net(), hook=gathering)


def test_a_manager_without_membership_averages_but_takes_no_hook() -> None:
    class OnlyReduces:
        def allreduce(self, tensor: torch.Tensor, *_: Any, **__: Any) -> Any:
            tensor.mul_(2)
            return self

        def wait(self) -> None: ...

        def errored(self) -> None: ...

        def report_error(self, e: Exception) -> None: ...

    model = DistributedDataParallel(OnlyReduces(), torch.nn.Linear(2, 1, bias=False))
    model(torch.ones(1, 2)).sum().backward()
    assert grads(model).tolist() == [2.0, 2.0]
    with pytest.raises(HookConfigError, match="OnlyReduces lacks num_participants"):
        commhooks.attach(model, Plain())


def test_attach_detach_attach() -> None:
    with SimulatedCluster() as cluster:
        manager = cluster.join("a")
        model = DistributedDataParallel(manager, net())
        first = commhooks.attach(model, TwoStage())
        with pytest.raises(AttachError, match="detach"):
            commhooks.attach(model, Plain())
        first.detach()
        manager.start_quorum()
        model(data("a")).sum().backward()
        second = commhooks.attach(model, Plain())
        model(data("a")).sum().backward()
        second.assert_active()
        assert second.stats()["steps"] == 1


def test_attach_refuses() -> None:
    with SimulatedCluster() as cluster:
        manager = cluster.join("a")
        with pytest.raises(AttachError, match="no buckets"):
            commhooks.attach(PureDistributedDataParallel(manager, net()), Plain())
        with pytest.raises(HookNotSupportedError, match="foreign hook"):
            commhooks.attach(DistributedDataParallel(manager, net()), lambda state, bucket: None)
        for bad in ({"static_graph": True}, {"find_unused_parameters": False}):
            with pytest.raises(HookConfigError, match="rebuild its buckets"):
                DistributedDataParallel(manager, net(), **bad)
        model = DistributedDataParallel(manager, net(), hook=Plain())
        with pytest.raises(AttachError, match="no quorum"):
            model(data("a")).sum().backward()


def test_transport_without_a_quorum_names_the_missing_call() -> None:
    with SimulatedCluster() as cluster, pytest.raises(AttachError, match="start_quorum"):
        ManagerTransport(cluster.join("a")).begin()


@pytest.mark.parametrize("kind", ["ddp", "pure", "attached"])
def test_a_late_member_writes_nothing_into_gradients_after_a_dropped_attempt(kind: str) -> None:
    """Member a fails when some of its messages are in flight, and zeroes its gradients. Then member b sends its part of them."""
    dropped, sent = threading.Event(), threading.Event()

    def fail(manager: SimulatedManager, number: int) -> None:
        if manager.name == "a" and number == 3:
            manager.report_error(ArithmeticError("bad data"))

    def body(manager: SimulatedManager) -> float:
        manager.start_quorum()
        if kind == "pure":
            model: torch.nn.Module = PureDistributedDataParallel(manager, net())
        else:
            options: dict[str, Any] = {"bucket_cap_mb": CAP, "gradient_as_bucket_view": True}
            model = DistributedDataParallel(manager, net(), hook=None if kind == "ddp" else Plain(), **options)
        if manager.name == "b":
            asks = manager.allreduce

            def allreduce(tensor: torch.Tensor, *given: Any, **named: Any) -> Any:
                if manager.number == 2:  # member a waits for the first messages before it notices its failure
                    assert dropped.wait(20.0)
                return asks(tensor, *given, **named)

            manager.allreduce = allreduce  # type: ignore[method-assign]
        model(data(manager.name)).pow(2).mean().backward()
        if manager.name == "b":
            sent.set()
            return 0.0
        assert manager.errored() is not None
        model.zero_grad(set_to_none=False)
        dropped.set()
        assert sent.wait(20.0)
        return float(grads(model).abs().sum())

    with SimulatedCluster() as cluster:
        cluster.on_collective = fail
        assert cluster.run({"a": body, "b": body}) == {"a": 0.0, "b": 0.0}
