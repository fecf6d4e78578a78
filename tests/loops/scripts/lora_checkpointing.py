"""Fine-tune a frozen model by LoRA under activation checkpointing."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint
from toy import FOLDER, SEED, Net, finish, loader, save, test


class LoRALinear(nn.Module):
    def __init__(self, base, r=16, alpha=16):
        super().__init__()
        self.base, self.scaling = base.requires_grad_(False), alpha / r
        self.lora_a = nn.Parameter(torch.randn(r, base.in_features) * base.in_features**-0.5)
        self.lora_b = nn.Parameter(torch.zeros(base.out_features, r))

    def forward(self, x):
        return self.base(x) + x @ self.lora_a.T @ self.lora_b.T * self.scaling


class Checkpointed(nn.Module):
    def __init__(self, net):
        super().__init__()
        net.features, net.head = LoRALinear(net.features), LoRALinear(net.head)
        self.net = net

    def forward(self, x):
        return checkpoint(self.net, x, use_reentrant=False)


dist.init_process_group("gloo")
torch.manual_seed(SEED)
model = DDP(Checkpointed(Net()))
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
batches = loader()
saved, first = FOLDER / "checkpoint.pt", 0
if saved.exists():
    loaded = torch.load(saved)
    model.module.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    first = loaded["epoch"] + 1
for epoch in range(first, 3):
    batches.sampler.set_epoch(epoch)
    for x, y in batches:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    if dist.get_rank() == 0:
        save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}, saved)
finish(test(model), model)
dist.destroy_process_group()
