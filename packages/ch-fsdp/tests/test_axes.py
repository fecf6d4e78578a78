"""Parameter groups on several meshes. The error names the mesh of each group."""

from collections.abc import Iterator

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import commhooks
from commhooks import HookNotSupportedError

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def sharded(*meshes: DeviceMesh) -> nn.Sequential:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in meshes))
    for layer, mesh in zip(model, meshes, strict=True):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=meshes[0])
    return model


def test_two_shard_groups_are_refused_with_their_names() -> None:
    groups = [dist.new_group([0]) for _ in range(2)]
    model = sharded(*(DeviceMesh.from_group(group, "cpu") for group in groups))
    with pytest.raises(HookNotSupportedError) as refused:
        commhooks.attach(model, "bf16_compress", axis="shard", single_process=True)
    text = str(refused.value)
    for group in groups:
        assert f"over group {group.group_name}" in text
    assert "one handle serves one shard mesh. Attach to a submodule" in text


def test_replicas_of_some_groups_only_are_refused_with_their_numbers() -> None:
    whole = init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard"))
    model = sharded(whole, whole["shard"])
    with pytest.raises(
        HookNotSupportedError, match=r"different replicas by their 2-D meshes \(.*: 1 ranks; .*: none\)"
    ):
        commhooks.attach(model, "bf16_compress", single_process=True)
