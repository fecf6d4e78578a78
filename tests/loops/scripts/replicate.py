"""Replicate the model by `replicate()` in place of the DDP class."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate import replicate
from toy import SEED, Net, finish, loader, test

dist.init_process_group("gloo")
torch.manual_seed(SEED)
model = replicate(Net())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
batches = loader()
for epoch in range(2):
    batches.sampler.set_epoch(epoch)
    for x, y in batches:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
finish(test(model), model)
dist.destroy_process_group()
