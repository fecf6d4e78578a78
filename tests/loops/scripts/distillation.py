"""Distil a wrapped teacher that is frozen after it was wrapped."""

import torch
import torch.distributed as dist
import toy
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from toy import FEATURES, SEED, Net, finish, loader, test

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
for epoch in range(2):
    batches.sampler.set_epoch(epoch)
    for x, y in batches:
        soft = teacher(x)
        out = student(x)
        loss = 0.5 * nn.functional.mse_loss(out, soft) + 0.5 * nn.functional.mse_loss(out, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
finish(test(student), student)
dist.destroy_process_group()
