"""Train with SAM, whose first backward is inside `no_sync()`."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from toy import FOLDER, SEED, Net, finish, loader, save, test


class SAM(torch.optim.Optimizer):
    """Sharpness-aware minimization, as the widely copied PyTorch version has it."""

    def __init__(self, params, base_optimizer, rho=0.05, **kwargs):
        super().__init__(params, {"rho": rho, **kwargs})
        self.base_optimizer = base_optimizer(self.param_groups, **kwargs)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self, zero_grad=False):
        grads = [p.grad.norm(p=2) for group in self.param_groups for p in group["params"] if p.grad is not None]
        grad_norm = torch.norm(torch.stack(grads), p=2)
        for group in self.param_groups:
            scale = group["rho"] / (grad_norm + 1e-12)
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p]["old_p"] = p.data.clone()
                    p.add_(p.grad * scale)
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def second_step(self, zero_grad=False):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data = self.state[p]["old_p"]
        self.base_optimizer.step()
        if zero_grad:
            self.zero_grad()


dist.init_process_group("gloo")
torch.manual_seed(SEED)
model = DDP(Net())
optimizer = SAM(model.parameters(), torch.optim.AdamW, lr=1e-2)
batches = loader()
checkpoint, first = FOLDER / "checkpoint.pt", 0
if checkpoint.exists():
    loaded = torch.load(checkpoint)
    model.module.load_state_dict(loaded["model"])
    optimizer.base_optimizer.load_state_dict(loaded["optimizer"])
    first = loaded["epoch"] + 1
for epoch in range(first, 2):
    batches.sampler.set_epoch(epoch)
    for x, y in batches:
        with model.no_sync():
            nn.functional.mse_loss(model(x), y).backward()
        optimizer.first_step(zero_grad=True)
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.second_step(zero_grad=True)
    if dist.get_rank() == 0:
        save(
            {"model": model.module.state_dict(), "optimizer": optimizer.base_optimizer.state_dict(), "epoch": epoch},
            checkpoint,
        )
finish(test(model), model)
dist.destroy_process_group()
