"""Distil a wrapped teacher that is frozen after it was wrapped."""

import torch
import torch.distributed as dist
import toy
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from toy import FEATURES, FOLDER, SEED, Net, finish, loader, save, test

dist.init_process_group("gloo")
torch.manual_seed(SEED)
large = nn.Linear(FEATURES, FEATURES)
large.weight.data.copy_(toy.teacher().T)
large.bias.data.zero_()
teacher, student = DDP(large), DDP(Net())
teacher.eval()
for parameter in teacher.parameters():
    parameter.requires_grad = False
optimizer = torch.optim.AdamW(student.parameters(), lr=1e-2)
batches = loader()
checkpoint, first = FOLDER / "checkpoint.pt", 0
if checkpoint.exists():
    loaded = torch.load(checkpoint)
    student.module.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    first = loaded["epoch"] + 1
for epoch in range(first, 2):
    batches.sampler.set_epoch(epoch)
    for x, y in batches:
        soft = teacher(x)
        out = student(x)
        loss = 0.5 * nn.functional.mse_loss(out, soft) + 0.5 * nn.functional.mse_loss(out, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if dist.get_rank() == 0:
        save({"model": student.module.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}, checkpoint)
finish(test(student), student)
dist.destroy_process_group()
