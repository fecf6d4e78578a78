"""Accumulate two backwards by `require_backward_grad_sync`, as nanoGPT does."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from toy import SEED, Net, finish, loader, test

dist.init_process_group("gloo")
torch.manual_seed(SEED)
model = DDP(Net())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
gradient_accumulation_steps = 2
batches = loader(batch_size=16)
for epoch in range(2):
    batches.sampler.set_epoch(epoch)
    data = iter(batches)
    for _ in range(len(batches) // gradient_accumulation_steps):
        for micro_step in range(gradient_accumulation_steps):
            x, y = next(data)
            model.require_backward_grad_sync = micro_step == gradient_accumulation_steps - 1
            loss = nn.functional.mse_loss(model(x), y) / gradient_accumulation_steps
            loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
finish(test(model), model)
dist.destroy_process_group()
