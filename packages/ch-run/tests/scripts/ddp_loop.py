"""A DDP loop of PyTorch's tutorial: train, save on rank 0, resume. An option kills it after a step."""

import argparse
import os
import signal

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=8)
parser.add_argument("--save", type=int, default=0)
parser.add_argument("--kill", type=int, default=0)
parser.add_argument("--resume", action="store_true")
options = parser.parse_args()

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
network = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.Tanh(), torch.nn.Linear(96, 64))
model = DistributedDataParallel(network, bucket_cap_mb=0.02)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
begin = 0
if options.resume:
    saved = torch.load("checkpoint.pt", weights_only=True)
    model.module.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    begin = saved["step"]

for step in range(begin, options.steps):
    data = torch.randn(8, 64, generator=torch.Generator().manual_seed(100 * step + rank))
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(model(data), data).backward()
    optimizer.step()
    if step + 1 == options.save:
        if rank == 0:
            saved = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
            torch.save(saved, "checkpoint.pt")
        dist.barrier()
    if step + 1 == options.kill:
        os.kill(os.getpid(), signal.SIGKILL)

if rank == 0:
    torch.save(model.module.state_dict(), "weights.pt")
dist.destroy_process_group()
