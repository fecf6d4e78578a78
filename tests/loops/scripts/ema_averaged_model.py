"""Keep an EMA by torch's AveragedModel, which starts with the second epoch."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from toy import FOLDER, SEED, Net, finish, loader, save, test

dist.init_process_group("gloo")
torch.manual_seed(SEED)
model = DDP(Net())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
batches = loader()
ema_model, first = None, 0
if (FOLDER / "checkpoint.pt").exists():
    loaded = torch.load(FOLDER / "checkpoint.pt")
    model.module.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    first = loaded["epoch"] + 1
    if loaded["ema_model"]:
        ema_model = AveragedModel(model.module, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        ema_model.load_state_dict(loaded["ema_model"])
for epoch in range(first, 3):
    batches.sampler.set_epoch(epoch)
    if epoch >= 1 and ema_model is None:
        ema_model = AveragedModel(model.module, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for x, y in batches:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        if ema_model is not None:
            ema_model.update_parameters(model.module)
    if dist.get_rank() == 0:
        checkpoint = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
        save({**checkpoint, "ema_model": ema_model and ema_model.state_dict()}, FOLDER / "checkpoint.pt")
finish(test(ema_model), model)
dist.destroy_process_group()
