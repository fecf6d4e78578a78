"""Step the weights by AdamW and the biases by Adam, which have an optimizer each, and save inside an epoch."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from toy import FOLDER, SEED, Net, finish, loader, save, test

dist.init_process_group("gloo")
torch.manual_seed(SEED)
model = DDP(Net())
decay = [p for p in model.parameters() if p.ndim >= 2]
no_decay = [p for p in model.parameters() if p.ndim < 2]
optimizers = [torch.optim.AdamW(decay, lr=1e-2, weight_decay=0.01), torch.optim.Adam(no_decay, lr=1e-2)]
batches = loader()
step, done = 0, 0
if (FOLDER / "last.pt").exists():
    last = torch.load(FOLDER / "last.pt")
    model.module.load_state_dict(last["model"])
    for optimizer, state in zip(optimizers, last["optimizers"], strict=True):
        optimizer.load_state_dict(state)
    done = last["step"]
for epoch in range(2):
    batches.sampler.set_epoch(epoch)
    for x, y in batches:
        step += 1
        if step <= done:
            continue
        for optimizer in optimizers:
            optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        for optimizer in optimizers:
            optimizer.step()
        if step % 12 == 0 and dist.get_rank() == 0:
            states = [optimizer.state_dict() for optimizer in optimizers]
            save({"model": model.module.state_dict(), "optimizers": states, "step": step}, FOLDER / "last.pt")
finish(test(model), model)
dist.destroy_process_group()
