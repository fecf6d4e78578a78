"""Keep an EMA by torch's AveragedModel, which starts with the second epoch."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from toy import SEED, Net, finish, loader, test

dist.init_process_group("gloo")
torch.manual_seed(SEED)
model = DDP(Net())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
batches = loader()
ema_model = None
for epoch in range(2):
    batches.sampler.set_epoch(epoch)
    if epoch == 1:
        ema_model = AveragedModel(model.module, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for x, y in batches:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        if ema_model is not None:
            ema_model.update_parameters(model.module)
finish(test(ema_model), model)
dist.destroy_process_group()
