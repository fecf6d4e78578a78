"""Step the weights by AdamW and the biases by Adam, which have an optimizer each."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from toy import SEED, Net, finish, loader, test

dist.init_process_group("gloo")
torch.manual_seed(SEED)
model = DDP(Net())
decay = [p for p in model.parameters() if p.ndim >= 2]
no_decay = [p for p in model.parameters() if p.ndim < 2]
optimizers = [torch.optim.AdamW(decay, lr=1e-2, weight_decay=0.01), torch.optim.Adam(no_decay, lr=1e-2)]
batches = loader()
for epoch in range(2):
    batches.sampler.set_epoch(epoch)
    for x, y in batches:
        for optimizer in optimizers:
            optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        for optimizer in optimizers:
            optimizer.step()
finish(test(model), model)
dist.destroy_process_group()
