"""Train on a large batch with GradCache: embed chunks without gradients, then push the cached gradients back."""

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
batches = loader()
for epoch in range(2):
    batches.sampler.set_epoch(epoch)
    for x, y in batches:
        optimizer.zero_grad()
        chunks = x.chunk(4)
        with torch.no_grad():
            reps = torch.cat([model(chunk) for chunk in chunks])
        reps.requires_grad_()
        loss = nn.functional.mse_loss(reps, y)
        loss.backward()
        cache = reps.grad.chunk(4)
        for i, (chunk, grad) in enumerate(zip(chunks, cache, strict=True)):
            with nullcontext() if i == len(chunks) - 1 else model.no_sync():
                surrogate = torch.dot(model(chunk).flatten(), grad.flatten())
                surrogate.backward()
        optimizer.step()
finish(test(model), model)
dist.destroy_process_group()
