"""Checkpoints of an earlier tree load, and training continues from them with that tree's numbers.

Commit 1b03c08 wrote `tests/state/checkpoints/0.1.0/` on two gloo ranks with `python tests/state/test_old_checkpoints.py
FOLDER`. The folder holds `state_dict()` of every hook of `HOOKS` and rank, and a pickled `PowerSGDState` of the
`register_comm_hook` path. It also holds weights with PowerSGD's state on FSDP2's replicate axis in one distributed
checkpoint, and the gradients of the steps after each of them. Never write into that folder again. A later format gets a
new folder.
"""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import commhooks
from commhooks.checkpoint import dcp
from commhooks.testing import spawn

HERE = Path(__file__).parent / "checkpoints"
POWERSGD = "powersgd(rank=2, min_compression_rate=1)"
HOOKS = {
    "powersgd": POWERSGD,
    "error_feedback": "error_feedback(bf16_wrapper(allreduce))",
    "composed": "warmup(bf16_wrapper(powersgd(rank=2, min_compression_rate=1)), steps=1)",
}
BEFORE, AFTER = range(3), range(3, 6)
Grads = dict[str, torch.Tensor]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 32), nn.Tanh(), nn.Linear(32, 24), nn.Tanh(), nn.Linear(24, 8))


def ddp() -> DistributedDataParallel:
    return DistributedDataParallel(net(), bucket_cap_mb=0.002)  # three buckets


def fsdp2() -> FSDPModule:
    """Two replicas without shards. The replicate axis then holds the whole gradient."""
    model, mesh = net(), init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))["shard"]
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def step(model: nn.Module, number: int) -> Grads:
    """Run one backward and one plain SGD step. Return the reduced gradients."""
    generator = torch.Generator().manual_seed(number * 16 + dist.get_rank())
    model.zero_grad()
    model(torch.randn(4, 24, generator=generator)).square().mean().backward()
    found = {
        n.removeprefix("module."): whole(p.grad).clone() for n, p in model.named_parameters() if p.grad is not None
    }
    with torch.no_grad():
        for p in model.parameters():
            p.sub_(0.1 * p.grad)
    return found


def weights(model: nn.Module) -> Grads:
    return {n.removeprefix("module."): p.detach() for n, p in model.named_parameters()}


def load_weights(model: nn.Module, saved: Grads) -> None:
    with torch.no_grad():
        for name, p in weights(model).items():
            p.copy_(saved[name])


# -- writing, once


def write(rank: int, world: int, folder: str) -> None:
    for name, expr in HOOKS.items():
        model = ddp()
        handle = commhooks.attach(model, expr)
        for number in BEFORE:
            step(model, number)
        assert handle.stats()["compressed_steps"] > 0
        saved = {"hook": handle.state_dict(), "weights": {n: p.clone() for n, p in weights(model).items()}}
        saved["after"] = [step(model, number) for number in AFTER]
        torch.save(saved, f"{folder}/{name}-{rank}.pt")
    write_bare(rank, folder)
    write_fsdp2(rank, folder)


def write_bare(rank: int, folder: str) -> None:
    """Write by PyTorch's own way, which pickles the state object itself."""
    from ch_powersgd import PowerSGDState, powerSGD_hook

    model = ddp()
    state = PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2, min_compression_rate=1)
    model.register_comm_hook(state, powerSGD_hook)
    for number in BEFORE:
        step(model, number)
    saved: dict[str, Any] = {"weights": {n: p.clone() for n, p in weights(model).items()}}
    torch.save(state, f"{folder}/bare-{rank}.state")
    saved["after"] = [step(model, number) for number in AFTER]
    torch.save(saved, f"{folder}/bare-{rank}.pt")


def write_fsdp2(rank: int, folder: str) -> None:
    model = fsdp2()
    handle = commhooks.attach(model, POWERSGD)
    for number in BEFORE:
        step(model, number)
    assert handle.stats()["compressed_steps"] > 0
    kept = {f"model.{n}": whole(p).clone() for n, p in weights(model).items()}
    torch_dcp.save({**kept, **dcp.sharded(handle)}, checkpoint_id=f"{folder}/fsdp2")
    torch.save({"after": [step(model, number) for number in AFTER]}, f"{folder}/fsdp2-{rank}.pt")


# -- reading


def goes_on(model: nn.Module, after: list[Grads]) -> None:
    """Check the later steps, up to the rounding of another processor's matrix products."""
    for number, wanted in zip(AFTER, after, strict=True):
        found = step(model, number)
        assert found.keys() == wanted.keys()
        for name, gradient in wanted.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6)


def read(rank: int, world: int, folder: str, name: str) -> None:
    saved = torch.load(f"{folder}/{name}-{rank}.pt", weights_only=True)
    model = ddp()
    handle = commhooks.attach(model, HOOKS[name])
    load_weights(model, saved["weights"])
    handle.load_state_dict(saved["hook"])
    again, wanted = handle.state_dict(), saved["hook"]
    assert again["step"] == wanted["step"] == len(BEFORE)
    assert again["entries"].keys() == wanted["entries"].keys()
    for parameter, fields in wanted["entries"].items():
        assert again["entries"][parameter].keys() == fields.keys()
        assert all(torch.equal(again["entries"][parameter][field], t) for field, t in fields.items()), parameter
    goes_on(model, saved["after"])
    assert handle.stats()["compressed_steps"] == len(AFTER)


def read_bare(rank: int, world: int, folder: str) -> None:
    from ch_powersgd import PowerSGDState, powerSGD_hook

    saved = torch.load(f"{folder}/bare-{rank}.pt", weights_only=True)
    state = torch.load(f"{folder}/bare-{rank}.state", weights_only=False)
    assert isinstance(state, PowerSGDState)
    assert state.step == len(BEFORE)
    assert any(state.entries())
    model = ddp()
    load_weights(model, saved["weights"])
    model.register_comm_hook(state, powerSGD_hook)
    goes_on(model, saved["after"])


def read_fsdp2(rank: int, world: int, folder: str) -> None:
    kept = {f"model.{n}": torch.empty_like(p) for n, p in net().named_parameters()}
    torch_dcp.load(kept, checkpoint_id=f"{folder}/fsdp2")
    model = fsdp2()
    with torch.no_grad():
        for name, p in model.named_parameters():
            p._local_tensor.copy_(kept[f"model.{name}"])
    handle = commhooks.attach(model, POWERSGD)
    dcp.load(handle, f"{folder}/fsdp2")
    assert handle.state_dict()["step"] == len(BEFORE)
    goes_on(model, torch.load(f"{folder}/fsdp2-{rank}.pt", weights_only=True)["after"])
    assert handle.stats()["compressed_steps"] == len(AFTER)


VERSIONS = sorted(path.name for path in HERE.iterdir())
pytestmark = pytest.mark.gloo


@pytest.mark.parametrize("name", HOOKS)
@pytest.mark.parametrize("version", VERSIONS)
def test_state_dict(version: str, name: str) -> None:
    spawn(read, 2, str(HERE / version), name)


@pytest.mark.parametrize("version", VERSIONS)
def test_pickled_state(version: str) -> None:
    spawn(read_bare, 2, str(HERE / version))


@pytest.mark.parametrize("version", VERSIONS)
def test_distributed_checkpoint(version: str) -> None:
    spawn(read_fsdp2, 2, str(HERE / version))


if __name__ == "__main__":
    Path(sys.argv[1]).mkdir(parents=True)  # never overwrite an existing record
    spawn(write, 2, str(Path(sys.argv[1]).resolve()), timeout=120)
