"""Train by Muon, whose step shares out the matrices and gathers them, and Adam for the rest."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from toy import SEED, Net, finish, loader, test


def newton_schulz(g, steps=5):
    a, b, c = 3.4445, -4.7750, 2.0315
    x = g / (g.norm() + 1e-7)
    x = x.T if g.size(0) > g.size(1) else x
    for _ in range(steps):
        s = x @ x.T
        x = a * x + (b * s + c * s @ s) @ x
    return x.T if g.size(0) > g.size(1) else x


class Muon(torch.optim.Optimizer):
    def __init__(self, params, lr=0.02, momentum=0.95):
        super().__init__(sorted(params, key=lambda p: p.size(), reverse=True), {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            params = group["params"]
            padded = params + [torch.empty_like(params[-1])] * (-len(params) % dist.get_world_size())
            for base in range(0, len(padded), dist.get_world_size()):
                if base + dist.get_rank() < len(params):
                    p = params[base + dist.get_rank()]
                    momentum = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                    momentum.lerp_(p.grad, 1 - group["momentum"])
                    p.add_(newton_schulz(p.grad.lerp_(momentum, group["momentum"])), alpha=-group["lr"])
                for i in range(dist.get_world_size()):
                    dist.broadcast(padded[base + i], src=i)


dist.init_process_group("gloo")
torch.manual_seed(SEED)
model = DDP(Net())
muon = Muon([p for p in model.parameters() if p.ndim >= 2], lr=0.04)
adam = torch.optim.Adam([p for p in model.parameters() if p.ndim < 2], lr=1e-2)
batches = loader()
for epoch in range(2):
    batches.sampler.set_epoch(epoch)
    for x, y in batches:
        model.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        muon.step()
        adam.step()
finish(test(model), model)
dist.destroy_process_group()
