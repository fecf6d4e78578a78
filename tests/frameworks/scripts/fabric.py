"""Fabric's tutorial, a manual loop. `python -m torch.distributed.run ... FOLDER [--resume]`."""

import os
import sys

import lightning as L
import torch
from torch import nn

from ch_ddp.frameworks.fabric import CommHookDDPStrategy  # hook

folder, resume = sys.argv[1], "--resume" in sys.argv

L.seed_everything(1)
ranks = int(os.environ.get("WORLD_SIZE", "1"))
# plain: fabric = L.Fabric(accelerator="cpu", strategy="ddp", devices=ranks)
fabric = L.Fabric(accelerator="cpu", strategy=CommHookDDPStrategy("powersgd(rank=2)"), devices=ranks)  # hook
fabric.launch()
model = nn.Sequential(nn.Linear(28 * 28, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
model, optimizer = fabric.setup(model, torch.optim.Adam(model.parameters(), lr=1e-3))
state = {"model": model, "optimizer": optimizer, "step": 0}
if resume:
    fabric.load(f"{folder}/step10.ckpt", state)
for step in range(state["step"], 20):
    generator = torch.Generator().manual_seed(1000 * step + fabric.global_rank)
    images, labels = torch.rand(8, 28 * 28, generator=generator), torch.randint(10, (8,), generator=generator)
    optimizer.zero_grad()
    fabric.backward(nn.functional.cross_entropy(model(images), labels))
    optimizer.step()
    state["step"] = step + 1
    if step + 1 == 10:
        fabric.save(f"{folder}/step10.ckpt", state)
