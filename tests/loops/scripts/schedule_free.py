"""Train by schedule-free AdamW, whose eval() puts the averaged weights in for tests and checkpoints."""

import schedulefree
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from toy import FOLDER, SEED, Net, finish, loader, save, test

dist.init_process_group("gloo")
torch.manual_seed(SEED)
model = DDP(Net())
optimizer = schedulefree.AdamWScheduleFree(model.parameters(), lr=2e-2, warmup_steps=5)
batches = loader()
first = 0
if (FOLDER / "last.pt").exists():
    last = torch.load(FOLDER / "last.pt")
    model.module.load_state_dict(last["model"])
    optimizer.load_state_dict(last["optimizer"])
    first = last["epoch"] + 1
for epoch in range(first, 2):
    batches.sampler.set_epoch(epoch)
    model.train()
    optimizer.train()
    for x, y in batches:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    model.eval()
    optimizer.eval()
    loss = test(model)
    if dist.get_rank() == 0:
        last = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
        save(last, FOLDER / "last.pt")
finish(loss, model)
dist.destroy_process_group()
