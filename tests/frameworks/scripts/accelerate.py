"""Accelerate's quick tour, a manual loop. `python -m torch.distributed.run ... FOLDER [--resume]`."""

import sys

import torch
from accelerate import Accelerator
from torch import nn

from ch_ddp.frameworks.accelerate import CommHookKwargs  # hook

folder, resume = sys.argv[1], "--resume" in sys.argv

torch.manual_seed(1)
# plain: accelerator = Accelerator(cpu=True)
accelerator = Accelerator(cpu=True, kwargs_handlers=[CommHookKwargs("powersgd(rank=2)")])  # hook
model = nn.Sequential(nn.Linear(28 * 28, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
images = torch.utils.data.TensorDataset(torch.rand(640, 28 * 28), torch.randint(10, (640,)))
loader = torch.utils.data.DataLoader(images, batch_size=8)
model, optimizer, loader = accelerator.prepare(model, torch.optim.Adam(model.parameters(), lr=1e-3), loader)
done = 0
if resume:
    accelerator.load_state(f"{folder}/step10")
    loader, done = accelerator.skip_first_batches(loader, 10), 10
for batch, labels in loader:
    if done == 20:
        break
    optimizer.zero_grad()
    accelerator.backward(nn.functional.cross_entropy(model(batch), labels))
    optimizer.step()
    done += 1
    if done == 10:
        accelerator.save_state(f"{folder}/step10")
accelerator.end_training()
