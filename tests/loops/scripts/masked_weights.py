"""Prune by a mask that is applied after each step, and clamp the weights."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from toy import FOLDER, SEED, Net, finish, loader, save, test

dist.init_process_group("gloo")
torch.manual_seed(SEED)
model = DDP(Net())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
masks = {n: (p.abs() > p.abs().quantile(0.1)).float() for n, p in model.named_parameters() if p.ndim > 1}
batches = loader()
checkpoint, first = FOLDER / "checkpoint.pt", 0
if checkpoint.exists():
    loaded = torch.load(checkpoint)
    model.module.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    first = loaded["epoch"] + 1
for epoch in range(first, 2):
    batches.sampler.set_epoch(epoch)
    for x, y in batches:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        with torch.no_grad():
            for name, p in model.named_parameters():
                if name in masks:
                    p.mul_(masks[name])
                p.clamp_(-1.0, 1.0)
    if dist.get_rank() == 0:
        save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}, checkpoint)
finish(test(model), model)
dist.destroy_process_group()
