"""Step inside the backward, by DDP's own `_register_fused_optim`."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from toy import SEED, Net, finish, loader, test

dist.init_process_group("gloo")
torch.manual_seed(SEED)
model = DDP(Net())
model._register_fused_optim(torch.optim.AdamW, lr=1e-2)
batches = loader()
for epoch in range(2):
    batches.sampler.set_epoch(epoch)
    for x, y in batches:
        model.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
finish(test(model), model)
dist.destroy_process_group()
