"""Late errors of a GPU, shown on a CPU. The backward ends before its error is known.

On CUDA, reading the status at that point would make the host wait. Until then nothing may use the results of a failed
step. A scaler sees NaN and skips the step. With ``optimizer=`` the error comes from ``optimizer.step()``.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commhooks
from ch_core import StepOutcome
from commhooks import AllReduce, Bucket, HookNotSupportedError, Reduction, Stages, StepContext


class Fails(Reduction):
    """Plain averaging that raises in the third step, before or after its collective."""

    name, lossy = "fails", True

    def __init__(self, where: str) -> None:
        self.where = where

    def run(self, bucket: Bucket, ctx: StepContext) -> Stages:
        bad = ctx.step == 2 and bucket.device.type != "meta"
        if bad and self.where == "before":
            raise ArithmeticError("as told")
        yield AllReduce(bucket.buffer)
        if bad:
            raise ArithmeticError("as told")


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Iterator[DistributedDataParallel]:
    """Return a model in a group of one rank, whose outcomes are read as late as on CUDA."""
    send = StepOutcome.send

    def late(self: Any, *args: Any) -> None:
        send(self, *args)
        self._reads_late = True

    monkeypatch.setattr(StepOutcome, "send", late)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.manual_seed(0)
    yield DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), bucket_cap_mb=0.0002)
    dist.destroy_process_group()


def image(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1).clone() for p in model.parameters()])


def gradient(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("where", ["before", "after"])
def test_nothing_finite_is_left_of_a_failed_step_and_the_next_backward_tells(
    model: DistributedDataParallel, where: str
) -> None:
    handle = commhooks.attach(model, Fails(where), single_process=True)
    for _ in range(3):
        model.zero_grad()
        model(torch.ones(2, 8)).sum().backward()
    assert bool(gradient(model).isnan().all())
    with pytest.raises(ArithmeticError, match="as told"):
        model(torch.ones(2, 8)).sum().backward()
    handle.detach()
    model.zero_grad()
    model(torch.ones(2, 8)).sum().backward()
    assert bool(gradient(model).isfinite().all())


@pytest.mark.parametrize("where", ["before", "after"])
def test_a_scaler_skips_the_failed_step(model: DistributedDataParallel, where: str) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    commhooks.attach(model, Fails(where), scaler=scaler, single_process=True)
    told = None
    for step in range(4):
        optimizer.zero_grad()
        before = image(model)
        try:
            scaler.scale(model(torch.ones(2, 8)).sum()).backward()
        except ArithmeticError:
            told = step
            break
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(image(model), before) == (step == 2)
        assert bool(image(model).isfinite().all())
    assert told == 3


@pytest.mark.parametrize("where", ["before", "after"])
def test_an_optimizer_that_was_given_raises_before_it_changes_anything(
    model: DistributedDataParallel, where: str
) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    commhooks.attach(model, Fails(where), optimizer=optimizer, single_process=True)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
    optimizer.zero_grad()
    model(torch.ones(2, 8)).sum().backward()
    before = image(model)
    with pytest.raises(ArithmeticError, match="as told"):
        optimizer.step()
    assert torch.equal(image(model), before)
    optimizer.zero_grad()
    model(torch.ones(2, 8)).sum().backward()  # repeats the third step and its error
    with pytest.raises(ArithmeticError, match="as told"):
        optimizer.step()


def test_a_capture_is_refused(model: DistributedDataParallel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that claims to be a GPU, and a stream that claims to be under capture."""
    handle = commhooks.attach(model, "allreduce", single_process=True)
    engine = handle.binding.engine if handle.binding is not None else None
    assert engine is not None
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    with pytest.raises(HookNotSupportedError, match="CUDA graph"):
        engine._begin(torch.device("cuda"))
    engine._begin(torch.device("cpu"))
    engine.abandon()


def test_the_scale_is_sent_for_when_the_forward_begins(
    model: DistributedDataParallel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``get_scale()`` would wait for the forward and backward so far. The engine calls it in the first step only."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    handle = commhooks.attach(model, "powersgd(min_compression_rate=0.1)", scaler=scaler, single_process=True)
    asked: list[int] = []
    scales: list[float] = []
    ask = scaler.get_scale
    monkeypatch.setattr(scaler, "get_scale", lambda: asked.append(len(scales)) or ask())
    for _ in range(6):
        optimizer.zero_grad()
        scale = ask()
        scaler.scale(model(torch.randn(4, 8)).square().sum()).backward()
        assert isinstance(handle.state, commhooks.HookState)
        assert handle.state.versions.loss_scale == scale
        scales.append(scale)
        scaler.step(optimizer)
        scaler.update()
    assert asked == [0]
    assert scales == [8.0, 8.0, 16.0, 16.0, 32.0, 32.0]
    handle.detach()
    assert not model.module._forward_pre_hooks
