"""Gradients for tests of hooks, in awkward shapes, with numbers that differ on every rank and step."""

import math
from collections.abc import Iterable

import torch


def parameters(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Return tensors like the parameters of an awkward model, in model order.

    Two matrices worth compressing, a convolution, one matrix stored transposed, primes, a scalar, and empty ones.
    """
    shapes = {
        "embed.weight": (64, 48),
        "conv.weight": (16, 8, 3, 3),
        "conv.bias": (16,),
        "scale": (),
        "empty": (0,),
        "hollow": (0, 8),
        "prime": (101,),
        "odd.weight": (53, 31),
        "head.weight": (96, 32),
        "head.bias": (96,),
    }
    made = {name: torch.zeros(shape, dtype=dtype, device="cpu") for name, shape in shapes.items()}
    made["turned.weight"] = torch.zeros(40, 64, dtype=dtype, device="cpu").t()  # (64, 40), stored as (40, 64)
    return made


def gradients(like: dict[str, torch.Tensor], rank: int, step: int) -> dict[str, torch.Tensor]:
    """Return one rank's gradients of one step: a strong rank-1 part that all ranks share, and the rank's noise."""
    made = {}
    for number, (name, tensor) in enumerate(like.items()):
        shared = torch.Generator().manual_seed(number)
        own = torch.Generator().manual_seed((step * 64 + rank) * 4096 + number + 1)
        value = 0.1 * torch.randn(tensor.shape, generator=own, dtype=torch.float32, device="cpu")
        if tensor.dim() >= 2 and tensor.numel():
            rows, columns = tensor.shape[0], tensor.numel() // tensor.shape[0]
            left, right = (
                torch.randn(rows, 1, generator=shared, dtype=torch.float32, device="cpu"),
                torch.randn(1, columns, generator=shared, dtype=torch.float32, device="cpu"),
            )
            value += (left @ right).view(tensor.shape)
        else:
            value += torch.randn(tensor.shape, generator=shared, dtype=torch.float32, device="cpu")
        made[name] = torch.empty_like(tensor).copy_(value)  # keeps the strides
    return made


def all_ranks(like: dict[str, torch.Tensor], world_size: int, step: int) -> list[dict[str, torch.Tensor]]:
    """Return :func:`gradients` of every rank."""
    return [gradients(like, rank, step) for rank in range(world_size)]


def average(every: Iterable[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return the exact average in fp64."""
    ranks = list(every)
    return {name: torch.stack([one[name].double() for one in ranks]).mean(0) for name in ranks[0]}


def distance(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    """Return ``|found - wanted| / |wanted|`` of two sets of gradients, each taken as one vector."""
    error = sum(float((found[n].double() - wanted[n].double()).square().sum()) for n in wanted)
    size = sum(float(wanted[n].double().square().sum()) for n in wanted)
    return math.sqrt(error / size if size else error)


def same_bits(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> list[str]:
    """Return the names of tensors that differ in any bit (NaN equals NaN)."""
    return [name for name in a if not torch.equal(a[name].nan_to_num(7.0), b[name].nan_to_num(7.0))]
