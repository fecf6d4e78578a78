"""Train by Accelerate with its accumulation and clipping, and its `save_state` after each epoch."""

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch import nn
from torch.utils.data import DataLoader
from toy import FOLDER, SEED, Net, dataset, finish, test

reproducible = DataLoaderConfiguration(use_seedable_sampler=True)  # by default a resumed epoch has another order
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, dataloader_config=reproducible)
set_seed(SEED)
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
batches = DataLoader(dataset(), batch_size=16, shuffle=True, drop_last=True)
model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
first = len(list(FOLDER.glob("epoch-*")))
if first > 0:
    accelerator.load_state(FOLDER / f"epoch-{first - 1}")
for epoch in range(first, 2):
    batches.set_epoch(epoch)
    for x, y in batches:
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    accelerator.save_state(FOLDER / "saving")
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        (FOLDER / "saving").rename(FOLDER / f"epoch-{epoch}")
    accelerator.wait_for_everyone()
finish(test(accelerator.unwrap_model(model)), model)
accelerator.end_training()
