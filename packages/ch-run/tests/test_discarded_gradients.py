"""``commhooks run --hook`` watches the optimizers: gradients that a script throws away leave no trace in a residual."""

import copy
import os
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commhooks
from ch_run.auto_attach import auto_attach
from ch_run.found_model import HookedModel
from ch_run.import_watch import watch
from ch_run.settings import Settings
from ch_testing import spawn

pytestmark = [pytest.mark.gloo, pytest.mark.timeout(200)]
FEEDBACK = "quant2(exempt=False, error_feedback=True)"


def begin(hook: str) -> None:
    os.environ.update(Settings(hook).environ())
    watch()
    auto_attach.cache_clear()


def model_of(rank: int) -> DistributedDataParallel:
    torch.manual_seed(0)
    return DistributedDataParallel(nn.Linear(32, 32))


def data(rank: int, step: int) -> torch.Tensor:
    return torch.randn(8, 32, generator=torch.Generator().manual_seed(10 * step + rank))


def backward(model: nn.Module, rank: int, step: int, scale: float = 1.0) -> None:
    (model(data(rank, step)).square().mean() * scale).backward()


def residuals(handle: Any) -> list[torch.Tensor]:
    return [row["residual"] for row in handle.state_dict()["entries"].values() if "residual" in row]


def thrown_away(rank: int, world: int, how: str) -> list[torch.Tensor]:
    """Train three steps. After each, throw a hundredfold gradient away. Return the weights and the residuals."""
    begin(FEEDBACK if how.startswith("run") else "allreduce")
    model = model_of(rank)
    late = how == "run, late optimizer"
    if late:
        model(data(rank, 9))  # a forward before the optimizer exists
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = None if how.startswith("run") else commhooks.attach(model, FEEDBACK, optimizer=optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0, growth_interval=1000) if how == "run, scaler" else None
    for step in range(3):
        optimizer.zero_grad()
        backward(model, rank, step)
        if scaler is None:
            optimizer.step()
        else:
            scaler.scale(torch.zeros(()))  # starts the scaler
            scaler.step(optimizer)
            scaler.update()
        if how != "run, nothing thrown away":
            optimizer.zero_grad()
            backward(model, rank, 100 + step, 100.0)
    optimizer.zero_grad()
    if handle is None:
        [found] = auto_attach().models
        assert isinstance(found, HookedModel) and found.handle is not None
        handle = found.handle
    handle.commit()
    return [*(p.detach().clone() for p in model.parameters()), *residuals(handle)]


@pytest.mark.parametrize("how", ["run", "run, late optimizer", "run, scaler", "attach"])
def test_gradients_that_are_thrown_away_leave_no_trace(how: str) -> None:
    clean = spawn(thrown_away, 2, "run, nothing thrown away", timeout=90)
    for found, expected in zip(spawn(thrown_away, 2, how, timeout=90), clean, strict=True):
        assert len(found) == len(expected) == 4
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def with_master_weights(rank: int, world: int, hook: str) -> str:
    """Step fp64 copies of the parameters. Return the error, and the step that raised it."""
    begin(hook)
    model = model_of(rank)
    masters = [nn.Parameter(copy.deepcopy(p.detach()).double()) for p in model.parameters()]
    optimizer = torch.optim.SGD(masters, lr=0.1)
    for step in range(3):
        model.zero_grad()
        try:
            backward(model, rank, step)
        except commhooks.StateError as error:
            return f"step {step}: {error}"
        except commhooks.CommHooksError as error:
            return f"step {step}: {type(error).__name__}"
        for master, p in zip(masters, model.parameters(), strict=True):
            assert p.grad is not None
            master.grad = p.grad.double()
        optimizer.step()
        with torch.no_grad():
            for master, p in zip(masters, model.parameters(), strict=True):
                p.copy_(master)
    return ""


def test_error_feedback_without_an_optimizer_of_the_parameters_is_refused_in_the_second_step() -> None:
    for said in spawn(with_master_weights, 2, FEEDBACK, timeout=90):
        assert said.startswith("step 1: ") and "no torch.optim optimizer holds them" in said and "optimizer=" in said


@pytest.mark.parametrize("hook", ["allreduce", "bf16_compress"])
def test_hooks_without_residuals_work_with_any_optimizer(hook: str) -> None:
    assert spawn(with_master_weights, 2, hook, timeout=90) == ["", ""]
