"""Adapters keep to the model's device, whatever the default device and the current GPU are.

``--device imagined`` finds a tensor of ours on the wrong device without a GPU. DDP's hooks are in ``test_every_hook.py``,
``Reducer`` is in ``test_reducer.py``, and ``test_device.py`` has streams and events of a GPU that is not current.
"""

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import commhooks
from ch_outer import OuterOptimizer, Schedule
from ch_testing import spawn

pytestmark = pytest.mark.timeout(120)


def net(device: torch.device) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64, device=device), nn.Tanh(), nn.Linear(64, 64, device=device))


def on_fsdp(device: torch.device, world: int, axis: str) -> tuple[nn.Module, Any]:
    model = net(device)
    shape = (world, 1) if axis == "replicate" else (1, world)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    handle = commhooks.attach(model, "quant4" if axis == "replicate" else "quant8", axis=axis)
    return model, handle


def trained(rank: int, world: int, how: str) -> bool:
    """Train with an adapter on a model of the rank's device. Return True if all gradients are finite and lie there."""
    device = torch.empty(0).device
    torch.set_default_device("cpu")
    if torch.cuda.device_count() > world:  # the last GPU belongs to no rank
        torch.cuda.set_device(torch.cuda.device_count() - 1)
    if how in ("replicate", "shard", "gather"):
        model, handle = on_fsdp(device, world, how)
    else:
        ids = [device] if device.type == "cuda" else None
        model = DistributedDataParallel(net(device), device_ids=ids)
        handle = None if how == "outer" else commhooks.attach(model, "powersgd(rank=2)")
    inner: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = OuterOptimizer(inner, model, Schedule(every=2), exchange="quant4") if how == "outer" else inner
    for step in range(5):
        optimizer.zero_grad()
        x = torch.randn(4, 64, generator=torch.Generator().manual_seed(10 * step + rank)).to(device)
        model(x).square().mean().backward()
        optimizer.step()
    if handle is not None:
        handle.load_state_dict(handle.state_dict())
        handle.check()
    grads: list[Any] = [getattr(p.grad, "_local_tensor", p.grad) for p in model.parameters()]
    return all(g.device.type == device.type and bool(g.isfinite().all()) for g in grads)


@pytest.mark.parametrize("how", ["ddp", "replicate", "shard", "gather", "outer"])
def test_an_adapter_keeps_to_the_models_device(how: str) -> None:
    assert spawn(trained, 2, how) == [True, True]
