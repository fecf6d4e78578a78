"""``fully_shard`` of PyTorch's tutorial, over replicas and shards, with a distributed checkpoint."""

import argparse
import os
import signal

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=8)
parser.add_argument("--save", type=int, default=0)
parser.add_argument("--kill", type=int, default=0)
parser.add_argument("--resume", action="store_true")
options = parser.parse_args()

dist.init_process_group("gloo")
rank = dist.get_rank()
mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("replicate", "shard"))
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.Tanh(), torch.nn.Linear(96, 64))
for layer in (model[0], model[2]):
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
begin = 0
if options.resume:
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments}
    dcp.load(state, checkpoint_id="checkpoint")
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    begin = options.save

for step in range(begin, options.steps):
    data = torch.randn(8, 64, generator=torch.Generator().manual_seed(100 * step + rank))
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(model(data), data).backward()
    optimizer.step()
    if step + 1 == options.save and not options.resume:
        weights, moments = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": moments}, checkpoint_id="checkpoint")
    if step + 1 == options.kill:
        os.kill(os.getpid(), signal.SIGKILL)

full = {name: p.full_tensor() for name, p in model.state_dict().items()}
if rank == 0:
    torch.save(full, "weights.pt")
dist.destroy_process_group()
