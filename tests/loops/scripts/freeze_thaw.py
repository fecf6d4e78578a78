"""Train the head for an epoch, then thaw the rest and wrap the model again with a new optimizer."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from toy import SEED, Net, finish, loader, test

dist.init_process_group("gloo")
torch.manual_seed(SEED)
net = Net()
net.features.requires_grad_(False)
model = DDP(net)
optimizer = torch.optim.AdamW(filter(lambda p: p.requires_grad, model.parameters()), lr=1e-2)
batches = loader()
for epoch in range(4):
    batches.sampler.set_epoch(epoch)
    if epoch == 1:
        net.features.requires_grad_(True)
        model = DDP(net)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for x, y in batches:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
finish(test(model), model)
dist.destroy_process_group()
