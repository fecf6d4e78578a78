"""Clip the gradients by their norm before SGD with momentum and a schedule, which resumes."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from toy import FOLDER, SEED, Net, finish, loader, save, test

dist.init_process_group("gloo")
torch.manual_seed(SEED)
model = DDP(Net())
optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9, weight_decay=1e-4)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=96)
batches = loader()
checkpoint, first = FOLDER / "checkpoint.pt", 0
if checkpoint.exists():
    loaded = torch.load(checkpoint)
    model.module.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    scheduler.load_state_dict(loaded["scheduler"])
    first = loaded["epoch"] + 1
for epoch in range(first, 3):
    batches.sampler.set_epoch(epoch)
    for x, y in batches:
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        scheduler.step()
    if dist.get_rank() == 0:
        states = {
            "model": model.module.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
        }
        save({**states, "epoch": epoch}, checkpoint)
finish(test(model), model)
dist.destroy_process_group()
