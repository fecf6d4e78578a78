"""The simulated ranks of ``programs.fsdp2.quality`` train as ``fully_shard`` does on gloo processes."""

from typing import Any

import pytest
import torch
from programs.fsdp2 import quality
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import commhooks
from ch_testing import spawn

pytestmark = [pytest.mark.gloo, pytest.mark.timeout(240)]

WORLD, STEPS, WIDTH = 2, 4, 48
HOOKS = [{}, {"gather": "quant8"}, {"gather": "quant4", "shard": "quant4"}]


class Net(nn.Module):
    """An embedding, which travels exactly, and matrices with uneven shards."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.symbol = nn.Embedding(17, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH + 1), nn.Linear(4 * WIDTH + 1, 17)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(self.symbol(x)))).float().square().mean()


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randint(17, (8, 5), generator=torch.Generator().manual_seed(10 * step + rank))


def on_processes(rank: int, world: int, hooks: dict[str, str]) -> tuple[list[Any], list[Any]]:
    """Return the gradients of each step and the last weights."""
    model = Net()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)), mp_policy=policy)
    if hooks:
        commhooks.attach_axes(model, **hooks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    gradients = []
    for step in range(STEPS):
        optimizer.zero_grad()
        model(batch(step, rank)).backward()
        gradients.append({name: p.grad.full_tensor() for name, p in model.named_parameters()})
        optimizer.step()
    return gradients, {name: p.full_tensor().detach() for name, p in model.named_parameters()}


def simulated(hooks: dict[str, str]) -> tuple[list[Any], Any]:
    model, small = Net(), Net().bfloat16()
    fsdp = quality.SimulatedFSDP2(model, hooks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    gradients = []
    for step in range(STEPS):
        with torch.no_grad():
            weights = fsdp.decoded()
            for name, p in small.named_parameters():
                p.copy_(weights[name])
        every = []
        for rank in range(WORLD):
            found = torch.autograd.grad(small(batch(step, rank)), list(small.parameters()))
            every.append(dict(zip(weights, found, strict=True)))
        with torch.no_grad():
            average = fsdp.reduced(every)
        for name, p in model.named_parameters():
            p.grad = average[name].float()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
        optimizer.step()
    return gradients, {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.full
@pytest.mark.parametrize("hooks", HOOKS, ids=["plain", "quant8", "quant4"])
def test_the_simulation_trains_as_fully_shard_does(hooks: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quality, "RANKS", WORLD)
    (gradients, weights), _ = spawn(on_processes, WORLD, hooks, timeout=120.0)
    expected, ended = simulated(hooks)
    for step, (found, wanted) in enumerate(zip(gradients, expected, strict=True)):
        for name, gradient in wanted.items():
            off = float((found[name] - gradient).norm() / gradient.norm())
            assert off < 1e-2, (step, name, off)  # bf16 rounds to 4e-3
    for name, weight in ended.items():
        assert float((weights[name] - weight).norm() / weight.norm()) < 1e-3, name
