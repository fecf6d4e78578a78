"""Stands for a user's own files: the data, a model, the test, and a file with the result of each rank."""

import hashlib
import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

FEATURES, HIDDEN = 32, 64
_finished = []
SEED = int(os.environ.get("LOOP_SEED", "0"))
FOLDER = Path(os.environ.get("LOOP_FOLDER", "."))


class Net(nn.Module):
    """A small network."""

    def __init__(self, norm=False):
        super().__init__()
        self.features = nn.Linear(FEATURES, HIDDEN)
        self.norm = nn.BatchNorm1d(HIDDEN) if norm else nn.Identity()
        self.head = nn.Linear(HIDDEN, FEATURES)

    def forward(self, x):
        return self.head(torch.tanh(self.norm(self.features(x))))


def teacher():
    """Return the matrix behind the data."""
    return torch.linalg.qr(torch.randn(FEATURES, FEATURES, generator=torch.Generator().manual_seed(1)))[0]


def dataset(size=2048, seed=2):
    """Return noisy products of random rows and the matrix."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, FEATURES, generator=generator)
    return TensorDataset(x, x @ teacher() + 0.3 * torch.randn(size, FEATURES, generator=generator))


def loader(batch_size=32, size=2048):
    """Return the batches of this rank: 32 of them in an epoch."""
    data = dataset(size)
    sampler = DistributedSampler(data, seed=SEED) if dist.is_initialized() else None
    return DataLoader(data, batch_size=batch_size, sampler=sampler, shuffle=sampler is None, drop_last=True)


@torch.no_grad()
def test(model):
    """Return the loss on test data."""
    x, y = dataset(512, seed=3).tensors
    parameter = next(model.parameters())
    training = model.training
    model.eval()
    loss = nn.functional.mse_loss(model(x.to(parameter.dtype)).float(), y).item()
    model.train(training)
    return loss


def save(checkpoint, path):
    """Write a checkpoint. A process that dies in between leaves the earlier file."""
    torch.save(checkpoint, f"{path}.new")
    os.replace(f"{path}.new", path)


def finish(loss, *models):
    """Write the final loss, and a checksum of the parameters of this rank."""
    # The end of the process frees the models. Before, torch may wait for gloo's thread, which waits for the interpreter's lock.
    _finished.extend(models)
    found = hashlib.sha256()
    for model in models:
        for parameter in model.parameters():
            tensor = parameter.detach()
            tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            found.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    rank = dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))
    text = json.dumps({"loss": loss, "parameters": found.hexdigest()[:16]})
    (FOLDER / f"result-{rank}.json").write_text(text)
    print(text)
