"""`OptimizerWrapper` takes GradScaler, hooks and closures through the vote. Lightning and Accelerate accept it."""

import copy
import importlib.util
import itertools
from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from ch_ft import DistributedDataParallel, OptimizerWrapper
from ch_testing import SimulatedCluster, SimulatedManager
from commhooks import HookConfigError

NET = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))


def net() -> torch.nn.Module:
    return copy.deepcopy(NET)


def flat(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def data(name: str, step: int) -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(step * 1000 + ord(name)))


def scaler() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=1000)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("clip", [False, True])
def test_a_scaler_trains_as_with_the_optimizer_alone(fused: bool, clip: bool) -> None:
    def train(model: Any, optimizer: torch.optim.Optimizer) -> torch.Tensor:
        scale = scaler()
        for step in range(6):
            optimizer.zero_grad()
            loss = model(data("a", step)).pow(2).mean() * (float("inf") if step == 2 else 1.0)
            scale.scale(loss).backward()
            if clip:
                scale.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scale.step(optimizer)
            scale.update()
        assert scale.get_scale() == 2.0**11
        return flat(model)

    def adam(model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), lr=0.05, fused=fused)

    plain = net()
    wanted = train(plain, adam(plain))
    with SimulatedCluster() as cluster:
        manager = cluster.join("a")
        model = net()
        optimizer = OptimizerWrapper(manager, adam(model))
        assert torch.equal(train(model, optimizer), wanted)
        assert (optimizer.commits, optimizer.drops, manager.current_step()) == (5, 1, 5)
    assert not {"found_inf", "grad_scale"} & set(vars(optimizer))


def test_a_member_heals_in_a_step_that_its_scaler_skips() -> None:
    """Without a vote the member would never load the state that it received, and would count as healed from then on."""

    def body(manager: SimulatedManager) -> list[Any]:
        model = DistributedDataParallel(manager, net(), bucket_cap_mb=0.0001)
        if manager.name == "c":
            torch.nn.init.zeros_(model.module[0].weight)
        scale = scaler()
        optimizer = OptimizerWrapper(manager, torch.optim.SGD(model.parameters(), lr=0.1))
        manager.register_state_dict_fn("model", model.load_state_dict, model.state_dict)
        manager.register_state_dict_fn("scaler", scale.load_state_dict, scale.state_dict)
        for attempt in itertools.count(2 if manager.name == "c" else 0):
            optimizer.zero_grad()
            loss = model(data(manager.name, attempt)).pow(2).mean()
            overflows = manager.name == "a" and attempt == 2
            scale.scale(loss * (float("inf") if overflows else 1.0)).backward()
            scale.step(optimizer)
            scale.update()
            if manager.current_step() == 4:
                return [flat(model), optimizer.drops, scale.get_scale()]
        raise AssertionError

    with SimulatedCluster(timeout=10) as cluster:
        cluster._returning["c"] = 2  # the step with the overflow in its first attempt
        results = cluster.run(dict.fromkeys("abc", body))
    assert [drops for _, drops, _ in results.values()] == [1, 1, 1]
    assert {scale for _, _, scale in results.values()} == {2.0**11}
    assert all(torch.equal(parameters, results["a"][0]) for parameters, _, _ in results.values())


def one() -> tuple[SimulatedCluster, torch.nn.Parameter, OptimizerWrapper]:
    cluster = SimulatedCluster()
    weight = torch.nn.Parameter(torch.ones(1))
    return cluster, weight, OptimizerWrapper(cluster.join("a"), torch.optim.SGD([weight], lr=0.5))


def test_step_hooks_run_when_a_step_is_committed() -> None:
    """A hook that averages weights must not count a dropped step."""
    cluster, weight, optimizer = one()
    with cluster:
        ran: list[str] = []
        optimizer.register_step_pre_hook(lambda *_: ran.append("pre"))
        optimizer.register_step_post_hook(lambda *_: ran.append("post"))
        everywhere = register_optimizer_step_post_hook(lambda *_: ran.append("global"))
        try:
            for bad in (False, True, False):
                optimizer.zero_grad()
                weight.sum().backward()
                if bad:
                    optimizer.manager.report_error(RuntimeError("bad batch"))
                assert optimizer.step() is not bad
        finally:
            everywhere.remove()
    assert ran == ["pre", "post", "global"] * 2


def test_a_closure_runs_before_the_vote() -> None:
    cluster, weight, optimizer = one()
    with cluster:

        def closure() -> str:
            optimizer.zero_grad()
            weight.sum().backward()
            return "loss"

        with torch.no_grad():
            assert optimizer.step(closure) == "loss"
        assert optimizer.committed
        assert weight.item() == 0.5

        def bad() -> None:
            closure()
            optimizer.manager.report_error(RuntimeError("bad batch"))

        optimizer.step(bad)
        assert optimizer.committed is False
        assert weight.item() == 0.5


def test_refusals() -> None:
    with SimulatedCluster() as cluster:
        manager = cluster.join("a")
        with pytest.raises(HookConfigError, match=r"LBFGS evaluates the model inside step\(\), after the vote"):
            OptimizerWrapper(manager, torch.optim.LBFGS([torch.nn.Parameter(torch.ones(1))]))
        with pytest.raises(HookConfigError, match=r"got a Linear. Give a torch\.optim\.Optimizer"):
            OptimizerWrapper(manager, torch.nn.Linear(1, 1))  # type: ignore[arg-type]


@pytest.mark.full
@pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="Lightning is not installed")
def test_lightning_trains_with_it(tmp_path: Any) -> None:
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self, manager: SimulatedManager) -> None:
            super().__init__()
            self.manager = manager
            self.net = net()
            # In a list, because the net must not be a submodule twice.
            self.managed = [DistributedDataParallel(manager, self.net, bucket_cap_mb=0.0001)]

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            if index == 0:  # automatic optimization clears gradients after the forward pass, which needs a quorum
                self.manager.start_quorum()
            return self.managed[0](batch).pow(2).mean()

        def configure_optimizers(self) -> Any:
            optimizer = OptimizerWrapper(self.manager, torch.optim.SGD(self.net.parameters(), lr=0.1))
            return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]

    batches = torch.utils.data.DataLoader(data("a", 0).repeat(2, 1), batch_size=2)
    with SimulatedCluster() as cluster:
        module = Module(cluster.join("a"))
        trainer = pl.Trainer(
            accelerator="cpu", devices=1, max_epochs=2, default_root_dir=tmp_path, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(module, batches)
        assert module.manager.current_step() == 8
        assert not torch.equal(flat(module.net), flat(NET))
        assert trainer.optimizers[0].param_groups[0]["lr"] == 0.025


@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="Accelerate is not installed")
def test_accelerate_trains_with_it() -> None:
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.state import AcceleratorState, GradientState, PartialState

    with SimulatedCluster() as cluster:
        manager = cluster.join("a")
        model = DistributedDataParallel(manager, net(), bucket_cap_mb=0.0001)
        wrapper = OptimizerWrapper(manager, torch.optim.SGD(model.parameters(), lr=0.1))
        schedule = torch.optim.lr_scheduler.ExponentialLR(wrapper, 0.5)
        try:
            accelerator = Accelerator(cpu=True)
            optimizer, scheduler = accelerator.prepare(wrapper, schedule)
            assert isinstance(optimizer, AcceleratedOptimizer)
            for step in range(2):
                optimizer.zero_grad()
                accelerator.backward(model(data("a", step)).pow(2).mean())
                optimizer.step()
                scheduler.step()
        finally:
            AcceleratorState._reset_state()
            GradientState._reset_state()
            PartialState._reset_state()
        assert manager.current_step() == wrapper.commits == 2
        assert wrapper.param_groups[0]["lr"] == 0.025
