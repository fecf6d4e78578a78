"""A small model, its batches and its training, shared by the tests of this package."""

import threading
from dataclasses import fields
from typing import Any

import torch
from torch import nn

from ch_core import SimulatedGroup, SimulatedTransport
from ch_outer import OuterOptimizer, Schedule

BUILDING = threading.Lock()  # ranks are threads in some tests, and torch has one generator for all


def make(seed: int = 0) -> nn.Module:
    with BUILDING:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))


def alone() -> SimulatedTransport:
    return SimulatedTransport(SimulatedGroup(1), 0)


def by_options(inner: torch.optim.Optimizer, model: nn.Module, **options: Any) -> OuterOptimizer:
    """Return an outer optimizer from one dict of options, which also has those of its schedule."""
    schedule = {field.name: options.pop(field.name) for field in fields(Schedule) if field.name in options}
    return OuterOptimizer(inner, model, Schedule(**schedule), **options)


def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    x = torch.randn(16, 6, generator=generator)
    return x, torch.stack([x.sum(1).sin(), x[:, 0] * x[:, 1]], 1)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        x, y = batch(rank, step)
        (model(x) - y).square().mean().backward()
        optimizer.step()


def values(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
