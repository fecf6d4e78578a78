"""Evaluate and save on the first rank alone, in the middle of an epoch, as nanoGPT does."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from toy import FOLDER, SEED, Net, finish, loader, save, test

dist.init_process_group("gloo")
torch.manual_seed(SEED)
raw_model = Net()
model = DDP(raw_model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
iteration, best, done = 0, float("inf"), 0
if (FOLDER / "ckpt.pt").exists():
    loaded = torch.load(FOLDER / "ckpt.pt")
    raw_model.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    done, best = loaded["iteration"], loaded["best"]
batches = loader()
for epoch in range(2):
    batches.sampler.set_epoch(epoch)
    for x, y in batches:
        if iteration < done:
            iteration += 1
            continue
        if iteration % 10 == 5 and dist.get_rank() == 0:
            loss = test(raw_model)
            if loss < best:
                best = loss
                checkpoint = {"model": raw_model.state_dict(), "optimizer": optimizer.state_dict()}
                save({**checkpoint, "iteration": iteration, "best": best}, FOLDER / "ckpt.pt")
        optimizer.zero_grad(set_to_none=True)
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        iteration += 1
finish(test(raw_model), model)
dist.destroy_process_group()
