"""Freeze layers inside a model that was wrapped with `find_unused_parameters`, and thaw them after an epoch."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from toy import FOLDER, SEED, Net, finish, loader, save, test

dist.init_process_group("gloo")
torch.manual_seed(SEED)
model = DDP(Net(), find_unused_parameters=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
batches = loader()
checkpoint, first = FOLDER / "checkpoint.pt", 0
if checkpoint.exists():
    loaded = torch.load(checkpoint)
    model.module.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    first = loaded["epoch"] + 1
for epoch in range(first, 3):
    batches.sampler.set_epoch(epoch)
    for parameter in model.module.features.parameters():
        parameter.requires_grad = epoch > 0
    for x, y in batches:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    if dist.get_rank() == 0:
        states = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
        save({**states, "epoch": epoch}, checkpoint)
finish(test(model), model)
dist.destroy_process_group()
