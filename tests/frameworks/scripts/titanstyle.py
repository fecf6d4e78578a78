"""A loop in torchtitan's style: `replicate`, and `torch.distributed.checkpoint`. `... FOLDER [--resume]`."""

import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

folder, resume = sys.argv[1], "--resume" in sys.argv

dist.init_process_group("gloo")
torch.manual_seed(1)
model = replicate(nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
begin = 0
if resume:
    weights, moments = get_state_dict(model, optimizer)
    saved = {"model": weights, "optimizer": moments, "step": 0}
    dcp.load(saved, checkpoint_id=f"{folder}/step10")
    set_state_dict(model, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"])
    begin = saved["step"]
for step in range(begin, 20):
    numbers = torch.randn(8, 64, generator=torch.Generator().manual_seed(1000 * step + dist.get_rank()))
    optimizer.zero_grad()
    model(numbers).pow(2).mean().backward()
    optimizer.step()
    if step + 1 == 10:
        weights, moments = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": moments, "step": step + 1}, checkpoint_id=f"{folder}/step10")
