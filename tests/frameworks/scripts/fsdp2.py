"""PyTorch's FSDP2 tutorial: `fully_shard`, a distributed checkpoint. `python -m torch.distributed.run ... FOLDER [--resume]`."""

import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import commhooks  # hook
from commhooks.checkpoint.dcp import load, sharded  # hook

folder, resume = sys.argv[1], "--resume" in sys.argv

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("replicate", "shard"))
torch.manual_seed(1)
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))
for layer in (model[0], model[2], model):
    fully_shard(layer, mesh=mesh)
handle = commhooks.attach(model, "powersgd(rank=2)")  # hook
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
done = 0
if resume:
    weights, moments = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optim": moments}, checkpoint_id=f"{folder}/step10")
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    load(handle, f"{folder}/step10", world_change="mean")  # hook
    done = 10
while done < 20:
    generator = torch.Generator().manual_seed(1000 * done + dist.get_rank())
    numbers = torch.randn(8, 64, generator=generator)
    optimizer.zero_grad()
    nn.functional.mse_loss(model(numbers), numbers).backward()
    optimizer.step()
    done += 1
    if done == 10:
        weights, moments = get_state_dict(model, optimizer)
        # plain: dcp.save({"model": weights, "optim": moments}, checkpoint_id=f"{folder}/step10")
        dcp.save({"model": weights, "optim": moments, **sharded(handle)}, checkpoint_id=f"{folder}/step10")  # hook
dist.destroy_process_group()
