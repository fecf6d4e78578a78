"""Train with fake-quantized weights of torchao (QAT)."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torchao.quantization import quantize_
from torchao.quantization.qat import IntxFakeQuantizeConfig, QATConfig
from toy import SEED, Net, finish, loader, test

dist.init_process_group("gloo")
torch.manual_seed(SEED)
net = Net()
quantize_(net, QATConfig(weight_config=IntxFakeQuantizeConfig(torch.int8, group_size=32), step="prepare"))
model = DDP(net)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
batches = loader()
for epoch in range(2):
    batches.sampler.set_epoch(epoch)
    for x, y in batches:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
finish(test(net), model)
dist.destroy_process_group()
