"""Distributed checkpoints of a hook on FSDP2: one save for the whole mesh that loads on any mesh."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import commhooks
from ch_testing import spawn
from commhooks import CommHook, StateError
from commhooks.checkpoint import dcp

from .fsdp_kit import batch, flat_params, gpt, shard2, whole

pytestmark = [pytest.mark.timeout(240), pytest.mark.gloo]

POWERSGD = "powersgd(rank=2, min_compression_rate=1)"


def plane(replicas: int, shards: int) -> DeviceMesh:
    return init_device_mesh(torch.get_default_device().type, (replicas, shards), mesh_dim_names=("replicate", "shard"))


def built(mesh: DeviceMesh) -> tuple[Any, torch.optim.Optimizer, CommHook]:
    model = shard2(gpt(), mesh["shard"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, optimizer, commhooks.attach(model, POWERSGD)


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, numbers: range) -> None:
    for number in numbers:
        optimizer.zero_grad()
        model(*batch(number, dist.get_rank())).backward()
        optimizer.step()


def held(handle: CommHook) -> dict[tuple[str, str], torch.Tensor]:
    return {(n, f): t for n, row in handle.state_dict()["entries"].items() for f, t in row.items()}


def mean_residuals(handle: CommHook) -> dict[str, torch.Tensor]:
    """Return parameter -> mean residual over the replicas, with all shards joined by rows."""
    every: list[Any] = [None] * dist.get_world_size()
    shapes = {row.name: row.shape for row in handle.plan()}
    mine = {n: t.view(shapes[n]) for (n, field), t in held(handle).items() if field == "residual"}
    dist.all_gather_object(every, mine)
    found: dict[str, torch.Tensor] = {}
    for name in sorted({n for one in every for n in one}):
        replicas = [one[name] for one in every if name in one]
        mean = torch.stack(replicas).double().mean(0).float()
        fqn = name.partition("[")[0]
        found[fqn] = torch.cat([found[fqn], mean]) if fqn in found else mean
    return found


def body_everything(rank: int, world: int, folder: str) -> None:
    """Save model, optimizer and hook together, and resume on the same mesh to the bit."""
    mesh = plane(2, 2)
    model, optimizer, handle = built(mesh)
    steps(model, optimizer, range(3))
    assert handle.stats()["compressed_steps"] == 3
    weights, moments = get_state_dict(model, optimizer)
    torch_dcp.save({"model": weights, "optim": moments, **dcp.sharded(handle)}, checkpoint_id=folder)
    owed = mean_residuals(handle)

    model2, optimizer2, handle2 = built(mesh)
    weights2, moments2 = get_state_dict(model2, optimizer2)
    state = {"model": weights2, "optim": moments2}
    torch_dcp.load(state, checkpoint_id=folder)
    set_state_dict(model2, optimizer2, model_state_dict=state["model"], optim_state_dict=state["optim"])
    dcp.load(handle2, folder)
    before, after = held(handle), held(handle2)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[k], after[k]) for k in before)
    for one in ((model, optimizer), (model2, optimizer2)):
        steps(*one, range(3, 5))
    assert torch.equal(flat_params(model), flat_params(model2))
    on_other_meshes(folder, owed)


def on_other_meshes(folder: str, owed: dict[str, torch.Tensor]) -> None:
    """Load residuals without shards and with other shards, and check that no part is lost."""
    model, optimizer, handle = built(plane(4, 1))
    with pytest.raises(StateError, match=r"has 2 shards.*world_change='mean'"):
        dcp.load(handle, folder)
    assert handle.state_dict()["step"] == 0
    dcp.load(handle, folder, world_change="reset")
    assert not held(handle)
    dcp.load(handle, folder, world_change="mean")
    assert handle.state_dict()["step"] == 3
    assert all(field == "residual" for _, field in held(handle)), "Q of a shard means nothing to the whole"
    again = mean_residuals(handle)
    assert owed.keys() == again.keys()
    for name, residual in owed.items():
        torch.testing.assert_close(again[name], residual, rtol=0, atol=1e-9)
    steps(model, optimizer, range(3, 5))
    dcp.save(handle, folder + "-whole")
    owed = mean_residuals(handle)
    _, _, cut = built(plane(2, 2))
    dcp.load(cut, folder + "-whole", world_change="mean")
    again = mean_residuals(cut)
    for name, residual in owed.items():
        torch.testing.assert_close(again[name], residual, rtol=0, atol=1e-9)


@pytest.mark.full
def test_model_optimizer_and_hook_in_one_save(tmp_path: Any) -> None:
    spawn(body_everything, 4, str(tmp_path / "all"), timeout=200)


def body_digests(rank: int, world: int) -> None:
    """Check that only entries with the same name in two parts are compared. Each shard has different names."""
    model, optimizer, handle = built(plane(2, 2))
    steps(model, optimizer, range(2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("commhooks.checkpoint.dcp._bits", lambda tensor: pytest.fail("a digest of what nobody shares"))
        assert len(dcp.sharded(handle)) > 2


def test_a_shard_is_not_digested() -> None:
    spawn(body_digests, 4)


def test_digests_of_long_tensors() -> None:
    """A change anywhere in a tensor of several pieces changes its digest. So does an exchange of two bytes."""
    tensor = torch.arange(3 << 18, dtype=torch.float32)
    digests = {dcp._bits(tensor)}
    for place in (0, (1 << 18) - 1, 1 << 18, tensor.numel() - 1):
        other = tensor.clone()
        other[place] += 1
        digests.add(dcp._bits(other))
        digests.add(dcp._bits(tensor.roll(place + 1)))
    assert len(digests) == 8  # the last roll returns the tensor itself


def body_refused(rank: int, world: int, folder: str) -> None:
    """Check that saving a state that could never load raises an error on every rank."""
    mesh = plane(2, 2)
    model, optimizer, handle = built(mesh)
    steps(model, optimizer, range(2))
    with pytest.raises(StateError, match="not in the process group that saves"):
        dcp.save(handle, folder + "/part", process_group=mesh["replicate"].get_group())

    stages = init_device_mesh(torch.get_default_device().type, (2, 2, 1), mesh_dim_names=("pp", "replicate", "shard"))
    stage = stages.get_local_rank("pp")
    torch.manual_seed(stage)
    part = fully_shard(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)), mesh=stages["shard"])
    between = commhooks.attach(part, "powersgd(rank=2)")
    for number in range(2):
        part.zero_grad()
        part(torch.randn(8, 32, generator=torch.Generator().manual_seed(number + 10 * rank))).square().mean().backward()
    with pytest.raises(StateError, match="its own key: sharded"):
        dcp.save(between, folder + "/stages")
    dcp.save(between, folder + "/stages", key=f"stage{stage}")
    kept = held(between)
    again = fully_shard(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)), mesh=stages["shard"])
    loaded = commhooks.attach(again, "powersgd(rank=2)")
    dcp.load(loaded, folder + "/stages", key=f"stage{stage}")
    assert all(torch.equal(held(loaded)[k], t) for k, t in kept.items())
    assert whole(part[0].weight).shape == (32, 32)


@pytest.mark.full
def test_a_state_that_cannot_be_loaded_is_not_saved(tmp_path: Any) -> None:
    spawn(body_refused, 4, str(tmp_path), timeout=200)
