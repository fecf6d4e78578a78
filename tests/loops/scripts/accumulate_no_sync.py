"""Accumulate two backwards; the first one inside `no_sync()`. Save every ten steps, and skip the batches before."""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from toy import FOLDER, SEED, Net, finish, loader, save, test

dist.init_process_group("gloo")
torch.manual_seed(SEED)
model = DDP(Net())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
batches = loader(batch_size=16)
accumulate, step, done = 2, 0, 0
if (FOLDER / "latest.pt").exists():
    latest = torch.load(FOLDER / "latest.pt")
    model.load_state_dict(latest["model"])
    optimizer.load_state_dict(latest["optimizer"])
    done = latest["step"]
for epoch in range(2):
    batches.sampler.set_epoch(epoch)
    for i, (x, y) in enumerate(batches):
        if step < done:  # the batches of these steps have been used
            step += (i + 1) % accumulate == 0
            continue
        last = (i + 1) % accumulate == 0
        with nullcontext() if last else model.no_sync():
            loss = nn.functional.mse_loss(model(x), y) / accumulate
            loss.backward()
        if last:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            step += 1
            if step % 10 == 0 and dist.get_rank() == 0:
                latest = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                save(latest, FOLDER / "latest.pt")
finish(test(model), model)
dist.destroy_process_group()
