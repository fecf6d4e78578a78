"""Who takes part in the race: PyTorch's hooks, ours, and outer optimizers."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

import commhooks
from ch_bench.cost import peers
from ch_bench.outer.quality_cells import FOUR_BITS, SPARSE
from ch_outer import OuterOptimizer

REFERENCE = "torch allreduce"  # what all others have to reach; the floor is its loss at the speed of NOOP
NOOP = "noop"


@dataclass(frozen=True)
class Runner:
    """One of them: a peer of PyTorch's or a hook of ours (``every=0``), or an outer optimizer with this exchange."""

    exchange: str
    every: int = 0
    rate: float = 1.0
    momentum: float = 0.5
    fragments: int = 1
    overlap: int = 0
    mix: float = 0.0

    @property
    def label(self) -> str:
        """What tables call it."""
        if not self.every:
            return self.exchange
        over = f", {self.fragments} fragments, overlap {self.overlap}" if self.overlap else ""
        return f"outer H={self.every}, {self.exchange}, {self.rate:g}/{self.momentum:g}{over}"

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


RUNNERS = [
    Runner(REFERENCE),
    Runner(NOOP),
    Runner("torch fp16"),
    Runner("torch PowerSGD rank 4"),
    Runner("bf16_compress"),
    Runner("quant8"),
    Runner(FOUR_BITS),
    Runner("bf16_wrapper(powersgd(rank=4))"),
    Runner("bf16_wrapper(powersgd(rank=16))"),
    Runner("topk(density=0.02)"),
    Runner("bf16_compress", 10),
    Runner(FOUR_BITS, 10),
    Runner(SPARSE, 10, 1.0, 0.0),
    Runner(FOUR_BITS, 30),
    Runner(SPARSE, 30, 1.0, 0.0),
    Runner(FOUR_BITS, 20, 1.0, 0.5, 2, 5, 0.5),
]


@dataclass
class Running:
    """A runner on one rank, ready to train.

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


def start(runner: Runner, net: torch.nn.Module, make: Callable[[Any], torch.optim.Optimizer]) -> Running:
    """Put a runner in place on a model.

    Args:
        runner: who.
        net: with equal parameters on every rank.
        make: makes the optimizer of some parameters.
    """
    if runner.every:
        inner = make(net.parameters())
        sgd = partial(torch.optim.SGD, lr=runner.rate, momentum=runner.momentum, nesterov=runner.momentum > 0)
        outer = OuterOptimizer(
            inner,
            net,
            every=runner.every,
            exchange=runner.exchange,
            outer=lambda starts: sgd(list(starts)),
            fragments=runner.fragments,
            overlap=runner.overlap,
            mix=runner.mix,
        )
        return Running(net, outer, outer)
    # PyTorch's PowerSGD hangs on gloo with two buckets; the same one for all, so that nobody else has an advantage.
    model = DistributedDataParallel(net, bucket_cap_mb=1000.0, gradient_as_bucket_view=True)
    if runner.exchange in peers.NAMES:
        peers.attach(model, runner.exchange)
    else:
        commhooks.attach(model, runner.exchange)
    return Running(model, make(model.parameters()))


def _copy(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}
