"""Train an encoder and a decoder, each wrapped, in one backward and by one optimizer."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from toy import FEATURES, HIDDEN, SEED, finish, loader, test

dist.init_process_group("gloo")
torch.manual_seed(SEED)
encoder = DDP(nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.Tanh()))
decoder = DDP(nn.Linear(HIDDEN, FEATURES))
optimizer = torch.optim.AdamW([*encoder.parameters(), *decoder.parameters()], lr=1e-2)
batches = loader()
for epoch in range(2):
    batches.sampler.set_epoch(epoch)
    for x, y in batches:
        optimizer.zero_grad()
        nn.functional.mse_loss(decoder(encoder(x)), y).backward()
        optimizer.step()
finish(test(nn.Sequential(encoder.module, decoder.module)), encoder, decoder)
dist.destroy_process_group()
