"""Add a penalty on the gradient of the input, which needs a double backward."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from toy import SEED, Net, finish, loader, test

dist.init_process_group("gloo")
torch.manual_seed(SEED)
model = DDP(Net())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
batches = loader()
for epoch in range(2):
    batches.sampler.set_epoch(epoch)
    for x, y in batches:
        x.requires_grad_()
        out = model(x)
        (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        penalty = (gradient.norm(2, dim=1) - 1).square().mean()
        loss = nn.functional.mse_loss(out, y) + 1e-3 * penalty
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
finish(test(model), model)
dist.destroy_process_group()
