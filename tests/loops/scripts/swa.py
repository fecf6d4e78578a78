"""Average the weights of the last epochs with SWA, and recompute BatchNorm's statistics."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn
from toy import FOLDER, SEED, Net, finish, loader, save, test

dist.init_process_group("gloo")
torch.manual_seed(SEED)
model = DDP(Net(norm=True))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
swa_model = AveragedModel(model)
swa_scheduler = SWALR(optimizer, swa_lr=5e-3, anneal_epochs=1)
batches = loader(batch_size=64)
checkpoint, first = FOLDER / "checkpoint.pt", 0
if checkpoint.exists():
    loaded = torch.load(checkpoint)
    model.module.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    swa_model.load_state_dict(loaded["swa_model"])
    swa_scheduler.load_state_dict(loaded["swa_scheduler"])
    first = loaded["epoch"] + 1
for epoch in range(first, 4):
    batches.sampler.set_epoch(epoch)
    for x, y in batches:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    if epoch >= 2:
        swa_model.update_parameters(model)
        swa_scheduler.step()
    if dist.get_rank() == 0:
        states = {
            "model": model.module.state_dict(),
            "optimizer": optimizer.state_dict(),
            "swa_model": swa_model.state_dict(),
            "swa_scheduler": swa_scheduler.state_dict(),
        }
        save({**states, "epoch": epoch}, checkpoint)
update_bn(batches, swa_model)
finish(test(swa_model.module.module), model, swa_model)
dist.destroy_process_group()
