"""Train the matrices by `torch.optim.Muon` and the rest by AdamW."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from toy import SEED, Net, finish, loader, test

dist.init_process_group("gloo")
torch.manual_seed(SEED)
model = DDP(Net())
muon = torch.optim.Muon([p for p in model.parameters() if p.ndim == 2], lr=0.04)
adamw = torch.optim.AdamW([p for p in model.parameters() if p.ndim != 2], lr=1e-2)
batches = loader()
for epoch in range(2):
    batches.sampler.set_epoch(epoch)
    for x, y in batches:
        muon.zero_grad()
        adamw.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        muon.step()
        adamw.step()
finish(test(model), model)
dist.destroy_process_group()
