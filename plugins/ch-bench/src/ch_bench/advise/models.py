"""Three models of different make to try links with: much arithmetic a byte, little, and in between."""

from typing import Any

import torch
from torch import nn

from ch_bench.gpt import GPT


def gpt() -> tuple[nn.Module, tuple[Any, ...]]:
    """The GPT of the other benchmarks: 10.7 M parameters in 3 buckets, a batch of 128 symbols."""
    torch.manual_seed(0)
    x = torch.randint(0, 65, (1, 129))
    return GPT(65, 128, 384, 6, 6), (x[:, :-1], x[:, 1:])


def mlp() -> tuple[nn.Module, tuple[Any, ...]]:
    """Wide layers and a small batch: 6.3 M parameters, hardly any arithmetic for each."""
    torch.manual_seed(0)
    layers = [nn.Linear(1024, 1024), nn.ReLU()]
    for _ in range(5):
        layers += [nn.Linear(1024, 1024), nn.ReLU()]
    return nn.Sequential(*layers), (torch.randn(16, 1024),)


def convnet() -> tuple[nn.Module, tuple[Any, ...]]:
    """Convolutions over images of 64 by 64: 1.1 M parameters, each used thousands of times."""
    torch.manual_seed(0)

    def block(a: int, b: int, stride: int) -> list[nn.Module]:
        return [nn.Conv2d(a, b, 3, stride, 1), nn.GroupNorm(8, b), nn.ReLU()]

    body = [*block(3, 64, 1), *block(64, 128, 2), *block(128, 128, 1), *block(128, 256, 2), *block(256, 256, 2)]
    return nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 100)), (
        torch.randn(2, 3, 64, 64),
    )
