"""Ways to train over a slow link: a hook at every step, or an outer optimizer."""

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

import commhooks
from ch_bench.pytorch_hooks import LABELS, attach_pytorch
from ch_outer import FixedRanks, OuterOptimizer, Schedule

SPARSE = "topk(density=0.02, bits=2, decay=0.95)"
FOUR_BITS = "quant4"
# quant sends small tensors in full, a sixth of a small model's bytes; exempt=False compresses them, too.
ALL_TWO = "quant2(exempt=False)"
REFERENCE = "torch allreduce"  # sets the loss that the others must reach
BUCKET = 1.0  # MB: a quarter of the race's model; DDP's default of 25 would be one bucket


@dataclass(frozen=True)
class Method:
    """Content and schedule of the exchanges between workers.

    Attributes:
        every: inner steps of a round; 0 exchanges at every step, without an outer optimizer.
        exchange: expression of a hook, or a label of :mod:`ch_bench.pytorch_hooks`.
        rate, momentum: of the outer SGD (Nesterov).
        fragments: number of parts that are exchanged at different steps.
        overlap: steps that an exchange may take.
        mix: share of the local value that stays on arrival, or ``"carry"``.
        inner: factor of the inner optimizer's learning rate. A worker's step averages fewer gradients than all-reduce, and
            Adam divides by the larger noise. A factor up to the square root of the number of workers compensates for that
            (square-root scaling rule, arXiv:2205.10287).
        bucket_mb: size of DDP's buckets, whose exchanges overlap with the backward; 0 means one bucket.
        by_run: True to train a plain DDP loop as ``commhooks run --outer`` does.
    """

    every: int = 0
    exchange: str = "allreduce"
    rate: float = 1.0
    momentum: float = 0.5
    fragments: int = 1
    overlap: int = 0
    mix: float | str = 0.0
    inner: float = 1.0
    bucket_mb: float = 0.0
    by_run: bool = False

    @property
    def label(self) -> str:
        """Name in the tables."""
        if not self.every:
            return self.exchange + (f", buckets of {self.bucket_mb:g} MB" if self.bucket_mb else "")
        parts = f", {self.fragments} fragments" if self.fragments > 1 else ""
        arriving = "carried" if isinstance(self.mix, str) else f"mix {self.mix:g}"
        over = f", overlap {self.overlap}, {arriving}" if self.overlap else ""
        inner = f", inner rate × {self.inner:g}" if self.inner != 1.0 else ""
        run = "run --outer: " * self.by_run
        return (
            f"{run}H={self.every}, {self.exchange}, rate {self.rate:g}, momentum {self.momentum:g}{parts}{over}{inner}"
        )

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return asdict(self)

    @property
    def expression(self) -> str:
        """Expression for ``COMMHOOKS_OUTER``, which a process must have when it starts. Empty without ``by_run``."""
        if not self.by_run:
            return ""
        options = {
            name: getattr(self, name)
            for name in ("every", "exchange", "rate", "momentum", "fragments", "overlap", "mix")
        }
        return "local_sgd(" + ", ".join(f"{name}={value}" for name, value in options.items()) + ")"

    def outer(self, inner: torch.optim.Optimizer, net: torch.nn.Module, **options: Any) -> OuterOptimizer:
        """Return the outer optimizer around ``inner``; ``options`` are further options of it."""

        def sgd(starts: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
            return torch.optim.SGD(list(starts), lr=self.rate, momentum=self.momentum, nesterov=self.momentum > 0)

        schedule = Schedule(self.every, self.fragments, self.overlap, self.mix)
        return OuterOptimizer(inner, net, schedule, exchange=self.exchange, outer=sgd, **options)


RACE = [
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
    Method(8, FOUR_BITS, 1.0, 0.0, inner=1.41, by_run=True),
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
        model: to call.
        optimizer: to step.
        outer: the same optimizer if it is an outer one.
    """

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    outer: OuterOptimizer | None = None

    @property
    def safe(self) -> bool:
        """True if no message is in flight, so that a pause favours no method."""
        return self.outer is None or self.outer.under_way == 0

    def snapshot(self) -> dict[str, torch.Tensor]:
        """Return a copy of the model that all ranks share."""
        if self.outer is None:
            return _copy(self.model.module if isinstance(self.model, DistributedDataParallel) else self.model)
        with self.outer.global_parameters():
            return _copy(self.model)


def start(
    method: Method, net: torch.nn.Module, make: Callable[[Any], torch.optim.Optimizer], link: str | None = None
) -> Running:
    """Set up a method on a model.

    Args:
        method: to set up.
        net: with equal parameters on every rank.
        make: makes the inner optimizer from parameters.
        link: for ``link=``, if ranks are far apart.
    """
    if method.by_run:
        model = DistributedDataParallel(net)  # COMMHOOKS_OUTER makes the outer optimizer, in its first forward
        return Running(model, make(model.parameters()))
    if method.every:
        outer = method.outer(make(net.parameters()), net, ranks=FixedRanks(link=link))
        return Running(net, outer, outer)
    # PyTorch's PowerSGD hangs on gloo with two buckets, so one bucket is the default for all methods.
    model = DistributedDataParallel(net, bucket_cap_mb=method.bucket_mb or 1000.0, gradient_as_bucket_view=True)
    if method.exchange in LABELS:
        attach_pytorch(model, method.exchange)
    else:
        commhooks.attach(model, method.exchange, link=link)
    return Running(model, make(model.parameters()))


def _copy(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}
