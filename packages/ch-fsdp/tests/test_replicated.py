"""``replicate()`` on FSDP2 (``torch.distributed._composable.replicate_with_fsdp``): a handle reduces in torch's place."""

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh

import commhooks
from ch_fsdp import replicate_axis
from ch_testing import Faulty, spawn

from .fsdp_kit import batch, gpt, grads

pytestmark = [pytest.mark.timeout(240), pytest.mark.gloo]
POWERSGD = "powersgd(rank=2, min_compression_rate=1)"


def replicated(like: nn.Module | None = None) -> Any:
    mesh, model = (
        init_device_mesh(torch.get_default_device().type, (dist.get_world_size(),), mesh_dim_names=("replicate",)),
        gpt(),
    )
    for block in model.blocks:
        replicate(block, mesh=mesh)
    replicate(model, mesh=mesh)
    if like is not None:
        model.load_state_dict(like.state_dict())
    return model


def backward(model: Any, step: int, rank: int) -> torch.Tensor:
    model(*batch(step, rank)).backward()
    return torch.cat([g.reshape(-1) for g in grads(model).values()])


def train(model: Any, steps: range, rank: int) -> torch.Tensor:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gradients = []
    for step in steps:
        optimizer.zero_grad()
        gradients.append(backward(model, step, rank).clone())
        optimizer.step()
    return torch.cat(gradients)


def raised(action: Any) -> str:
    try:
        action()
    except Exception as error:
        return type(error).__name__
    return ""


def body(rank: int, world: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    plain, without = replicated(), replicated()
    handle = commhooks.attach(plain, "allreduce")
    found["allreduce is no hook"] = torch.equal(train(plain, range(3), rank), train(without, range(3), rank))
    found["several groups"] = handle.binding.calls > 3

    model = replicated()
    handle = commhooks.attach(model, POWERSGD)
    mine = train(model, range(3), rank)
    everyone = [torch.empty_like(mine) for _ in range(world)]
    dist.all_gather(everyone, mine)
    found["alike on all ranks"] = all(torch.equal(mine, one) for one in everyone)
    found["compressed"] = handle.stats()["compressed_steps"]
    saved = handle.state_dict()
    found["whole parameters"] = {name for name, _ in model.named_parameters()} >= set(saved["entries"]) != set()
    again = replicated(model)
    resumed = commhooks.attach(again, POWERSGD)
    resumed.load_state_dict(saved)
    found["resumes"] = torch.equal(train(again, range(3, 5), rank), train(model, range(3, 5), rank))
    handle.detach()
    fresh = replicated(model)
    found["detached, torch averages"] = torch.equal(train(model, range(5, 7), rank), train(fresh, range(5, 7), rank))

    faulty = Faulty(commhooks.create(POWERSGD).reduction)
    resumed.detach()
    handle = commhooks.attach(again, faulty)
    if rank == 1:
        faulty.arm("between")
    found["one rank raises"] = bool(raised(lambda: backward(again, 8, rank)))
    again.zero_grad()
    found["usable after it"] = bool(backward(again, 9, rank).isfinite().all())
    handle.detach()
    found["other hooks"] = raised(lambda: commhooks.attach(again, ["allreduce", "bf16_compress"][rank]))
    return found


def test_as_with_ddp() -> None:
    for found in spawn(body, 2, timeout=200):
        assert found == {
            "allreduce is no hook": True,
            "several groups": True,
            "alike on all ranks": True,
            "compressed": 3.0,
            "whole parameters": True,
            "resumes": True,
            "detached, torch averages": True,
            "one rank raises": True,
            "usable after it": True,
            "other hooks": "RankMismatchError",
        }


@pytest.mark.parametrize(
    ("backend", "moves"), [("cuda:nccl", True), ("cuda:nccl2", True), ("cpu:gloo,cuda:nccl", False)]
)
def test_a_group_that_carries_no_cpu_tensor_gets_those_of_the_accelerator(backend: str, moves: bool) -> None:
    moved, sent = mock.Mock(return_value=torch.device("cpu")), mock.Mock()
    with (
        mock.patch.object(dist, "get_backend_config", return_value=backend),
        mock.patch.object(torch.accelerator, "current_accelerator", moved),
        mock.patch.object(dist, "broadcast", sent),
    ):
        replicate_axis.broadcast(torch.nn.Linear(2, 2).parameters(), mock.Mock())
    assert moved.called is moves and sent.call_count == 2
