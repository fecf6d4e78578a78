"""Train in fp16 with a GradScaler whose first scales are too large, and clip the unscaled gradients; resume all of it."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from toy import FOLDER, SEED, Net, finish, loader, save, test

dist.init_process_group("gloo")
torch.manual_seed(SEED)
model = DDP(Net())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**28, growth_interval=20)
batches = loader()
checkpoint, first = FOLDER / "checkpoint.pt", 0
if checkpoint.exists():
    loaded = torch.load(checkpoint)
    model.module.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    scaler.load_state_dict(loaded["scaler"])
    first = loaded["epoch"] + 1
for epoch in range(first, 2):
    batches.sampler.set_epoch(epoch)
    for x, y in batches:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = nn.functional.mse_loss(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    if dist.get_rank() == 0:
        states = {
            "model": model.module.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scaler": scaler.state_dict(),
        }
        save({**states, "epoch": epoch}, checkpoint)
finish(test(model), model)
dist.destroy_process_group()
