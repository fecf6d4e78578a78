"""Who takes part in the race: PyTorch's hooks, ours, and outer optimizers."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

import commhooks
from ch_bench.cost import peers
from ch_bench.outer.method import ALL_TWO, FOUR_BITS, SPARSE, Method
from ch_outer import OuterOptimizer

REFERENCE = "torch allreduce"  # what all others have to reach
BUCKET = 1.0  # MB: a quarter of the model; DDP's default of 25 would be one bucket

METHODS = [
    Method(exchange=REFERENCE),
    Method(exchange="torch fp16"),
    Method(exchange="torch PowerSGD rank 4"),
    Method(exchange="bf16_compress"),
    Method(exchange=REFERENCE, bucket_mb=BUCKET),
    Method(exchange="torch fp16", bucket_mb=BUCKET),
    Method(exchange=FOUR_BITS, bucket_mb=BUCKET),
    Method(exchange="quant8"),
    Method(exchange=FOUR_BITS),
    Method(exchange="bf16_wrapper(powersgd(rank=4))"),
    Method(exchange="bf16_wrapper(powersgd(rank=8))"),
    Method(exchange="bf16_wrapper(powersgd(rank=16))"),
    Method(exchange="topk(density=0.02)"),
    *(Method(every, FOUR_BITS, 1.0, 0.0, inner=1.41) for every in (4, 8)),
    *(Method(4, FOUR_BITS, 1.0, momentum) for momentum in (0.0, 0.15)),
    Method(4, FOUR_BITS, 1.0, 0.0, 1, 1, "carry", inner=1.41),
    *(Method(every, ALL_TWO, 1.0, 0.0, 1, 1, "carry", inner=1.41) for every in (4, 8)),
    Method(8, FOUR_BITS, 1.0, 0.3),
    Method(16, FOUR_BITS, 1.0, 0.4, 4, 1, "carry"),
    Method(15, ALL_TWO),
    Method(15, ALL_TWO, 1.0, 0.5, 4, 3, "carry"),
    Method(20, FOUR_BITS, 1.0, 0.5, 2, 5, "carry"),
    Method(30, FOUR_BITS, 1.0, 0.5, 4, 5, "carry"),
    Method(10, "bf16_compress"),
    Method(10, FOUR_BITS),
    Method(10, SPARSE, 1.0, 0.0),
    Method(30, FOUR_BITS),
    Method(30, FOUR_BITS, 1.0, 0.5, 4, 5, 0.5),
    Method(30, FOUR_BITS, 1.0, 0.5, 4, 1, 0.0),
    Method(30, FOUR_BITS, 1.0, 0.5, 4, 2, 0.5),
    Method(30, SPARSE, 1.0, 0.0),
    Method(20, FOUR_BITS, 1.0, 0.5, 2, 5, 0.5),
    Method(30, SPARSE, 1.0, 0.0, 2, 5, 0.5),
    Method(100, FOUR_BITS),
    Method(100, FOUR_BITS, 1.0, 0.5, 4, 5, 0.5),
]


@dataclass
class Running:
    """A method on one rank, ready to train.

    Attributes:
        model: what is called.
        optimizer: what is stepped.
        outer: the same, if it is an outer one.
    """

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    outer: OuterOptimizer | None = None

    @property
    def safe(self) -> bool:
        """Whether a pause now gives no message more time than the clock shows."""
        return self.outer is None or self.outer.under_way == 0

    def snapshot(self) -> dict[str, torch.Tensor]:
        """A copy of the one model that all ranks share."""
        if self.outer is None:
            return _copy(self.model.module if isinstance(self.model, DistributedDataParallel) else self.model)
        with self.outer.global_parameters():
            return _copy(self.model)


def start(method: Method, net: torch.nn.Module, make: Callable[[Any], torch.optim.Optimizer]) -> Running:
    """Put a method in place on a model.

    Args:
        method: what it exchanges; a peer of PyTorch by its name.
        net: with equal parameters on every rank.
        make: makes the optimizer of some parameters.
    """
    if method.every:
        outer = method.outer(make(net.parameters()), net)
        return Running(net, outer, outer)
    # PyTorch's PowerSGD hangs on gloo with two buckets; where nothing else is said, the same one for all.
    model = DistributedDataParallel(net, bucket_cap_mb=method.bucket_mb or 1000.0, gradient_as_bucket_view=True)
    if method.exchange in peers.NAMES:
        peers.attach(model, method.exchange)
    else:
        commhooks.attach(model, method.exchange)
    return Running(model, make(model.parameters()))


def _copy(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}
