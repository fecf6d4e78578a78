"""Freeze layers inside a model that was wrapped with `find_unused_parameters`, and thaw them after an epoch."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from toy import SEED, Net, finish, loader, test

dist.init_process_group("gloo")
torch.manual_seed(SEED)
model = DDP(Net(), find_unused_parameters=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
batches = loader()
for epoch in range(3):
    batches.sampler.set_epoch(epoch)
    for parameter in model.module.features.parameters():
        parameter.requires_grad = epoch > 0
    for x, y in batches:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
finish(test(model), model)
dist.destroy_process_group()
