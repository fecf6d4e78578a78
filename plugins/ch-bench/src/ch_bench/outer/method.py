"""A way to train far apart: an exchange at every step, or an outer optimizer's."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ch_outer import OuterOptimizer

SPARSE = "topk(density=0.02, bits=2, decay=0.95)"
FOUR_BITS = "quant4"
# Small tensors, which quant sends whole, are a sixth of what it sends of a small model: here none is.
ALL_FOUR = "quant4(exempt=False)"
ALL_THREE = "quant(bits=3, error_feedback=True, exempt=False)"
ALL_TWO = "quant2(exempt=False)"


@dataclass(frozen=True)
class Method:
    """What the workers exchange and when.

    Attributes:
        every: inner steps of a round; 0: no outer optimizer, the exchange takes place at every step.
        exchange: an expression of a hook, or a name of :mod:`ch_bench.cost.peers` where those run.
        rate: of the outer SGD, as ``momentum`` (Nesterov's).
        fragments: parts that are exchanged at steps of their own.
        overlap: steps that an exchange has time for.
        mix: share of the local value that stays on arrival, or ``"carry"``.
        inner: by which the learning rate of the inner optimizer is multiplied. A worker's own step averages fewer gradients
            than all-reduce's, and Adam divides by what noise that leaves: up to the square root of the workers makes up
            for it (the square-root scaling rule of arXiv:2205.10287).
        bucket_mb: size of DDP's buckets, whose exchanges begin while the backward goes on; 0: one bucket.
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

    @property
    def label(self) -> str:
        """What tables call it."""
        if not self.every:
            return self.exchange + (f", buckets of {self.bucket_mb:g} MB" if self.bucket_mb else "")
        parts = f", {self.fragments} fragments" if self.fragments > 1 else ""
        arriving = "carried" if isinstance(self.mix, str) else f"mix {self.mix:g}"
        over = f", overlap {self.overlap}, {arriving}" if self.overlap else ""
        inner = f", inner rate × {self.inner:g}" if self.inner != 1.0 else ""
        return f"H={self.every}, {self.exchange}, rate {self.rate:g}, momentum {self.momentum:g}{parts}{over}{inner}"

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    def outer(self, inner: torch.optim.Optimizer, net: torch.nn.Module, **options: Any) -> OuterOptimizer:
        """The outer optimizer around `inner`; `options` are more of its own."""

        def sgd(starts: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
            return torch.optim.SGD(list(starts), lr=self.rate, momentum=self.momentum, nesterov=self.momentum > 0)

        return OuterOptimizer(
            inner,
            net,
            every=self.every,
            exchange=self.exchange,
            outer=sgd,
            fragments=self.fragments,
            overlap=self.overlap,
            mix=self.mix,
            **options,
        )
