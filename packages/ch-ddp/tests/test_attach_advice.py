"""Attach names the package to install, or the model to attach to, if it has no adapter for a model."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import torch, torch.distributed as dist, commhooks
from ch_core import ProcessGroupTransport
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
ddp = DistributedDataParallel(torch.nn.Linear(4, 4))
models = {
    "plain": torch.nn.Linear(4, 4),
    "fsdp2": fully_shard(torch.nn.Linear(4, 4), mesh=init_device_mesh("cpu", (1,))),
    "fsdp1": FullyShardedDataParallel(torch.nn.Linear(4, 4), device_id=torch.device("cpu")),
    "replicate": replicate(torch.nn.Linear(4, 4)),
    "compiled": torch.compile(ddp, backend="eager"),
}
for name, model in models.items():
    try:
        commhooks.attach(model, "allreduce")
    except commhooks.CommHooksError as error:
        print(name, type(error).__name__, str(error).replace(chr(10), " "))
fresh = {"lost ddp": DistributedDataParallel(torch.nn.Linear(4, 4)), "lost replicate": replicate(torch.nn.Linear(4, 4))}
ProcessGroupTransport().abort()
for name, model in fresh.items():
    try:
        commhooks.attach(model, "allreduce")
    except commhooks.TransportError as error:
        print(name.replace(" ", "_"), type(error).__name__, str(error))
dist.destroy_process_group()
"""


@pytest.mark.full
def test_the_error_for_a_model_without_an_adapter() -> None:
    environ = {**os.environ, "COMMHOOKS_DISABLE": "ch-fsdp", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environ, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    said = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    assert "AttachError" in said["plain"]
    assert "DistributedDataParallel(model)" in said["plain"]
    assert said["fsdp2"].startswith("AttachError")
    assert "comes with ch-fsdp, not installed here" in said["fsdp2"]
    assert "DistributedDataParallel" not in said["fsdp2"]
    assert said["fsdp1"].startswith("HookNotSupportedError")
    assert "fully_shard (FSDP2)" in said["fsdp1"] and "register_comm_hook" in said["fsdp1"]
    assert "pip install" not in said["fsdp1"]
    assert "replicate" not in said  # it has an adapter
    assert "compiled" not in said  # attach looks through it
    for kind in ("lost_ddp", "lost_replicate"):
        assert "make another group" in said[kind]
