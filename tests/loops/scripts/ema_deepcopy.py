"""Keep an EMA by deepcopy, and save copies of the model in half precision after each epoch, as YOLOv5 does."""

from copy import deepcopy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from toy import FOLDER, SEED, Net, finish, loader, save, test


class ModelEMA:
    def __init__(self, model, decay=0.9):
        self.ema, self.decay = deepcopy(model).eval(), decay
        for p in self.ema.parameters():
            p.requires_grad_(False)

    @torch.no_grad()
    def update(self, model):
        state = model.state_dict()
        for key, value in self.ema.state_dict().items():
            value.mul_(self.decay).add_(state[key].detach(), alpha=1 - self.decay)


dist.init_process_group("gloo")
torch.manual_seed(SEED)
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
last, first = FOLDER / "last.pt", 0
ckpt = torch.load(last, weights_only=False) if last.exists() else None
if ckpt:
    model.load_state_dict(ckpt["model"].float().state_dict())
    optimizer.load_state_dict(ckpt["optimizer"])
    first = ckpt["epoch"] + 1
ema = ModelEMA(model) if dist.get_rank() == 0 else None
if ema and ckpt:
    ema.ema.load_state_dict(ckpt["ema"].float().state_dict())
model = DDP(model)
batches = loader()
for epoch in range(first, 2):
    batches.sampler.set_epoch(epoch)
    for x, y in batches:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        if ema:
            ema.update(model.module)
    if ema:
        ckpt = {"model": deepcopy(model.module).half(), "ema": deepcopy(ema.ema).half(), "epoch": epoch}
        save({**ckpt, "optimizer": optimizer.state_dict()}, last)
    dist.barrier()
finish(test(ema.ema if ema else model.module), model)
dist.destroy_process_group()
