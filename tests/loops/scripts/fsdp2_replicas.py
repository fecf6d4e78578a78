"""Shard the model by FSDP2 inside each replica, and save it by a distributed checkpoint."""

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from toy import FOLDER, SEED, Net, finish, loader, test

dist.init_process_group("gloo")
torch.manual_seed(SEED)
mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("replicas", "shards"))
model = Net()
for layer in (model.features, model.head):
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
first = len(list(FOLDER.glob("epoch-*/.metadata")))  # which a checkpoint gets last
if first > 0:
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.load(states, checkpoint_id=FOLDER / f"epoch-{first - 1}")
    set_state_dict(model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
batches = loader(batch_size=16)
for epoch in range(first, 2):
    batches.sampler.set_epoch(epoch)
    for x, y in batches:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.save(states, checkpoint_id=FOLDER / f"epoch-{epoch}")
finish(test(model), model)
dist.destroy_process_group()
