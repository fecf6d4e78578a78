"""A model that sums its replicas' gradients (torchtitan). Another mesh must get the sum of the residuals."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule

import commhooks
from ch_testing import spawn
from commhooks import CommHook
from commhooks.checkpoint import dcp
from commhooks.checkpoint.one_file import gather, load_gathered

from .fsdp_kit import batch, gpt, shard2

pytestmark = [pytest.mark.timeout(240), pytest.mark.gloo]


def built(replicas: int, shards: int, factor: float | None) -> tuple[Any, CommHook]:
    mesh = init_device_mesh(torch.get_default_device().type, (replicas, shards), mesh_dim_names=("replicate", "shard"))
    model = shard2(gpt(), mesh)
    for module in model.modules():
        if factor is not None and isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(factor)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no PREMUL_SUM
    return model, commhooks.attach(model, "error_feedback(bf16_compress)")


def owed(handle: CommHook, replicas: int, sums: bool) -> float:
    """Return the sum of the residuals of all ranks, or the mean over replicas of each shard."""
    rows = [row["residual"].double() for row in handle.state_dict()["entries"].values()]
    total = torch.stack([row.sum() for row in rows]).sum() / (1 if sums else replicas)
    dist.all_reduce(total)
    return float(total)


def body(rank: int, world: int, folder: str) -> None:
    for factor in (1.0, None):
        model, handle = built(2, 2, factor)
        for step in range(3):
            model(*batch(step, rank)).backward()
        assert handle.binding is not None
        assert handle.binding.sums == (factor == 1.0)
        before = owed(handle, 2, factor == 1.0)
        assert before != 0.0
        dcp.save(handle, f"{folder}/{factor}")
        every = [gather(handle)]
        dist.broadcast_object_list(every)
        for replicas, shards in ((4, 1), (2, 2)):
            _, other = built(replicas, shards, factor)
            dcp.load(other, f"{folder}/{factor}", world_change="mean")
            assert owed(other, replicas, factor == 1.0) == pytest.approx(before, rel=1e-4)
            _, other = built(replicas, shards, factor)
            load_gathered(other, every[0], world_change="mean")
            assert owed(other, replicas, factor == 1.0) == pytest.approx(before, rel=1e-4)
            assert other.state_dict()["step"] == 3


@pytest.mark.full
def test_residuals_are_kept_on_every_mesh(tmp_path: Any) -> None:
    spawn(body, 4, str(tmp_path), timeout=220)
