"""An FSDP2 model that changes after attach: parameters are thawed and frozen."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import commhooks
from commhooks.testing import spawn

from .fsdp_kit import square

pytestmark = [pytest.mark.timeout(180), pytest.mark.gloo]


def two_layers(mesh: DeviceMesh, *, frozen: bool) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    model[1].requires_grad_(not frozen)
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def step(model: Any, rank: int, number: int) -> None:
    model.zero_grad()
    model(torch.randn(4, 32, generator=torch.Generator().manual_seed(10 * number + rank))).square().mean().backward()


def body_thawed(rank: int, world: int, expr: str, axis: str) -> None:
    mesh = square()
    model = two_layers(mesh, frozen=True)
    handle = commhooks.attach(model, expr, axis=axis)
    step(model, rank, 0)
    model[1].requires_grad_(True)
    for number in (1, 2):
        step(model, rank, number)
    handle.commit()
    held = handle.state.held()
    names = {name for name, _ in held}
    assert any(name.startswith("1.weight") for name in names)
    saved = handle.state_dict()
    assert set(saved["entries"]) == names == set(handle.state.state_dict()["entries"])
    assert {row.name.partition("[")[0] for row in handle.plan()} == {n for n, _ in model.named_parameters()}

    handle.load_state_dict(saved)
    assert handle.state.held() == held
    handle.state.load_state_dict(saved)
    assert handle.state.held() == held

    for frozen in (False, True):  # built with all parameters, or thawed again before it loads
        again = two_layers(mesh, frozen=frozen)
        other = commhooks.attach(again, expr, axis=axis)
        again[1].requires_grad_(True)
        other.load_state_dict(saved)
        assert other.state.held() == held
        for one in (model, again):
            step(one, rank, 3)
        for mine, same in zip(model.parameters(), again.parameters(), strict=True):
            assert torch.equal(mine.grad.to_local(), same.grad.to_local())
        handle.load_state_dict(saved)
        other.detach()

    model[1].requires_grad_(False)  # its residual waits until it is thawed again
    step(model, rank, 4)
    handle.commit()
    assert set(handle.state_dict()["entries"]) == names
    assert set(handle.state.state_dict()["entries"]) == names
    handle.load_state_dict(handle.state_dict())
    assert handle.state.held() == held
    handle.detach()
    assert commhooks.attach(model, expr, axis=axis, state=handle.state).state.held() == held


@pytest.mark.parametrize(
    ("expr", "axis"),
    [
        ("powersgd(rank=1, min_compression_rate=1)", "replicate"),
        ("quant4(error_feedback=True, block=16)", "shard"),
    ],
)
def test_parameters_thawed_and_frozen_keep_their_state(expr: str, axis: str) -> None:
    pytest.importorskip("ch_quant")
    spawn(body_thawed, 4, expr, axis)


def body_brackets(rank: int, world: int) -> None:
    """A module's name may look like the place of a shard."""
    model = nn.Sequential()
    model.add_module("e[0]", nn.Linear(32, 32))
    model = fully_shard(model, mesh=square()["shard"])
    handle = commhooks.attach(model, "quant4(error_feedback=True, block=16)", axis="shard")
    assert [row.name for row in handle.plan()] == [name for name, _ in model.named_parameters()]


def test_names_with_brackets_on_the_shard_axis() -> None:
    pytest.importorskip("ch_quant")
    spawn(body_brackets, 4)
