"""Accelerate's quick tour."""

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.Tanh(), torch.nn.Linear(96, 64))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(TensorDataset(torch.randn(48, 64)), batch_size=4)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for (batch,) in loader:
    optimizer.zero_grad()
    accelerator.backward(torch.nn.functional.mse_loss(model(batch), batch))
    optimizer.step()
accelerator.end_training()
