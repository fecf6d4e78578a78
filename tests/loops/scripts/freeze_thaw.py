"""Train the head for an epoch, then thaw the rest and wrap the model again with a new optimizer."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from toy import FOLDER, SEED, Net, finish, loader, save, test

dist.init_process_group("gloo")
torch.manual_seed(SEED)
net = Net()


def wrap(train_all):
    net.features.requires_grad_(train_all)
    model = DDP(net)
    return model, torch.optim.AdamW(filter(lambda p: p.requires_grad, model.parameters()), lr=1e-2)


first, checkpoint = 0, FOLDER / "checkpoint.pt"
if checkpoint.exists():
    loaded = torch.load(checkpoint)
    net.load_state_dict(loaded["model"])
    first = loaded["epoch"] + 1
model, optimizer = wrap(train_all=first > 1)
if first > 0:
    optimizer.load_state_dict(loaded["optimizer"])
batches = loader()
for epoch in range(first, 4):
    batches.sampler.set_epoch(epoch)
    if epoch == 1:
        model, optimizer = wrap(train_all=True)
    for x, y in batches:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    if dist.get_rank() == 0:
        save({"model": net.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}, checkpoint)
finish(test(model), model)
dist.destroy_process_group()
