"""Prune by a mask that is applied after each step, and clamp the weights."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from toy import SEED, Net, finish, loader, test

dist.init_process_group("gloo")
torch.manual_seed(SEED)
model = DDP(Net())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
masks = {n: (p.abs() > p.abs().quantile(0.1)).float() for n, p in model.named_parameters() if p.ndim > 1}
batches = loader()
for epoch in range(2):
    batches.sampler.set_epoch(epoch)
    for x, y in batches:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        with torch.no_grad():
            for name, p in model.named_parameters():
                if name in masks:
                    p.mul_(masks[name])
                p.clamp_(-1.0, 1.0)
finish(test(model), model)
dist.destroy_process_group()
