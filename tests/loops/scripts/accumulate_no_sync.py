"""Accumulate two backwards; the first one inside `no_sync()`."""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from toy import SEED, Net, finish, loader, test

dist.init_process_group("gloo")
torch.manual_seed(SEED)
model = DDP(Net())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
batches = loader(batch_size=16)
accumulate = 2
for epoch in range(2):
    batches.sampler.set_epoch(epoch)
    for i, (x, y) in enumerate(batches):
        last = (i + 1) % accumulate == 0
        with nullcontext() if last else model.no_sync():
            loss = nn.functional.mse_loss(model(x), y) / accumulate
            loss.backward()
        if last:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
finish(test(model), model)
dist.destroy_process_group()
