"""Helpers of this package's tests: a small GPT, its batches and functions that shard it."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

VOCAB, CONTEXT, WIDTH = 33, 8, 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH + 1)  # 65 rows, so shards are uneven
        self.down = nn.Linear(4 * WIDTH + 1, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part[:, None] for part in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True)[:, 0]
        return x + self.down(F.gelu(self.up(x)))


class TinyGPT(nn.Module):
    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.symbol = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        """Return the loss; without targets the logits."""
        stream = self.symbol(x)
        for block in self.blocks:
            stream = block(stream)
        logits = self.head(stream)
        return logits if y is None else F.cross_entropy(logits.flatten(0, 1), y.flatten())

    def generate(self, text: torch.Tensor, count: int) -> torch.Tensor:
        """Continue a text by the likeliest symbols."""
        for _ in range(count):
            logits = TinyGPT.forward(self, text[:, -CONTEXT:])
            text = torch.cat([text, logits[:, -1:].argmax(-1)], 1)
        return text


def gpt(seed: int = 0, layers: int = 2) -> TinyGPT:
    torch.manual_seed(seed)
    return TinyGPT(layers)


def batch(step: int, rank: int, size: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    """Return windows of a structured text. ``y`` follows from ``x`` by a fixed rule."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    start = torch.randint(VOCAB, (size, 1), generator=generator)
    text = (start + 5 * torch.arange(CONTEXT + 1)) % VOCAB
    return text[:, :-1], text[:, 1:]


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def grads(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return full gradients by name (FSDP2)."""
    return {n: whole(p.grad).clone() for n, p in model.named_parameters() if p.grad is not None}


def single(steps: int, world: int, lr: float = 0.1, **options: Any) -> tuple[TinyGPT, list[float]]:
    """Train one process on all ranks' batches."""
    model = gpt(**options)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = sum(model(*batch(step, rank)) for rank in range(world)) / world
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model, losses


def train(model: nn.Module, steps: int, rank: int, lr: float = 0.1) -> list[float]:
    """Train a wrapped model. Return the mean loss of each step over all ranks."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(*batch(step, rank))
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(float(mean) / dist.get_world_size())
    return losses


def shard2(model: nn.Module, mesh: DeviceMesh, **options: Any) -> FSDPModule:
    """Shard each block, then the rest, with FSDP2."""
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def line(size: int) -> DeviceMesh:
    return init_device_mesh(torch.get_default_device().type, (size,))


def square() -> DeviceMesh:
    return init_device_mesh(torch.get_default_device().type, (2, 2), mesh_dim_names=("replicate", "shard"))


def shard1(model: nn.Module, strategy: Any, **options: Any) -> FullyShardedDataParallel:
    """Shard with FSDP1. Each block is a unit, and the root holds the rest. (With original parameters, units are padded
    to 16 bytes.)
    """
    options.setdefault("use_orig_params", False)
    return FullyShardedDataParallel(
        model,
        sharding_strategy=strategy,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        device_id=torch.device(torch.get_default_device().type),
        **options,
    )


def flat_params(model: nn.Module) -> torch.Tensor:
    """Return all full parameters of an FSDP2 or plain model as one vector."""
    return torch.cat([whole(p.detach()).reshape(-1) for p in model.parameters()])


def one_backward(model: nn.Module, rank: int, step: int = 77) -> dict[str, torch.Tensor]:
    """Return the full gradients of one batch."""
    model.zero_grad()
    model(*batch(step, rank)).backward()
    return grads(model)


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Return the distance of all gradients, relative to ``b``."""
    assert a.keys() == b.keys()
    x, y = (torch.cat([v.double().reshape(-1) for v in d.values()]) for d in (a, b))
    return float((x - y).norm() / y.norm())
