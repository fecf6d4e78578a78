"""Train a bf16 model by an optimizer of fp32 master weights."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from toy import SEED, Net, finish, loader, test

dist.init_process_group("gloo")
torch.manual_seed(SEED)
model = DDP(Net().bfloat16())
master = [nn.Parameter(p.detach().clone().float()) for p in model.parameters()]
optimizer = torch.optim.AdamW(master, lr=1e-2)
batches = loader()
for epoch in range(2):
    batches.sampler.set_epoch(epoch)
    for x, y in batches:
        model.zero_grad()
        nn.functional.mse_loss(model(x.bfloat16()).float(), y).backward()
        for m, p in zip(master, model.parameters(), strict=True):
            m.grad = p.grad.float()
        optimizer.step()
        with torch.no_grad():
            for m, p in zip(master, model.parameters(), strict=True):
                p.copy_(m)
finish(test(model), model)
dist.destroy_process_group()
