"""Compile the wrapped model, and save under the names of the compiled one."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from toy import FOLDER, SEED, Net, finish, loader, save, test

dist.init_process_group("gloo")
torch.manual_seed(SEED)
model = DDP(Net())
compiled = torch.compile(model, backend="aot_eager")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
batches = loader()
checkpoint, first = FOLDER / "checkpoint.pt", 0
if checkpoint.exists():
    loaded = torch.load(checkpoint)
    compiled.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    first = loaded["epoch"] + 1
for epoch in range(first, 2):
    batches.sampler.set_epoch(epoch)
    for x, y in batches:
        optimizer.zero_grad()
        nn.functional.mse_loss(compiled(x), y).backward()
        optimizer.step()
    if dist.get_rank() == 0:
        save({"model": compiled.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}, checkpoint)
finish(test(model), model)
dist.destroy_process_group()
