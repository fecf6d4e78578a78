"""Keep an EMA that is copied into the model for each evaluation and restored after it, as in diffusers."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from toy import FOLDER, SEED, Net, finish, loader, test


class EMAModel:
    def __init__(self, parameters, decay=0.9):
        self.shadow, self.decay = [p.clone().detach() for p in parameters], decay

    @torch.no_grad()
    def step(self, parameters):
        for s, p in zip(self.shadow, parameters, strict=True):
            s.sub_((1 - self.decay) * (s - p))

    def store(self, parameters):
        self.stored = [p.detach().clone() for p in parameters]

    def copy_to(self, parameters):
        for s, p in zip(self.shadow, parameters, strict=True):
            p.data.copy_(s)

    def restore(self, parameters):
        for c, p in zip(self.stored, parameters, strict=True):
            p.data.copy_(c)


dist.init_process_group("gloo")
torch.manual_seed(SEED)
model = DDP(Net())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
ema = EMAModel(model.parameters())
batches = loader()
for step, (x, y) in enumerate([batch for _ in range(2) for batch in batches]):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
    ema.step(model.parameters())
    if step % 10 == 5:
        ema.store(model.parameters())
        ema.copy_to(model.parameters())
        test(model.module)
        if dist.get_rank() == 0:
            torch.save(model.module.state_dict(), FOLDER / "validated.pt")
        ema.restore(model.parameters())
ema.store(model.parameters())
ema.copy_to(model.parameters())
loss = test(model.module)
if dist.get_rank() == 0:
    torch.save(model.module.state_dict(), FOLDER / "model.pt")
    model.module.load_state_dict(torch.load(FOLDER / "model.pt"))
ema.restore(model.parameters())
finish(loss, model)
dist.destroy_process_group()
