"""Published methods as options of one :class:`~ch_outer.OuterOptimizer`; whatever is given besides takes their place."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from ch_outer.optimizer import OuterOptimizer

OuterFactory = Callable[[Sequence[torch.Tensor]], torch.optim.Optimizer]
"""Makes the outer optimizer of the starts, in model order."""


def nesterov(rate: float = 0.7, momentum: float = 0.9) -> OuterFactory:
    """Outer SGD with Nesterov momentum: ``v = momentum v + delta; start -= rate (delta + momentum v)``.

    >>> nesterov(0.5)([torch.zeros(1)]).param_groups[0]["lr"]
    0.5
    """
    return partial(torch.optim.SGD, lr=rate, momentum=momentum, nesterov=True)


def plain_sgd(rate: float = 1.0) -> OuterFactory:
    """Outer SGD without momentum; at rate 1 the start becomes the average of the ranks' parameters."""
    return partial(torch.optim.SGD, lr=rate)


def diloco(optim: torch.optim.Optimizer, model: torch.nn.Module, **options: Any) -> OuterOptimizer:
    """DiLoCo (arXiv:2311.08105): every 500 inner AdamW steps the exact mean, then Nesterov with 0.7 and 0.9.

    Args:
        optim: the inner optimizer.
        model: whose parameters it steps.
        **options: of :class:`OuterOptimizer`, in place of the paper's.

    Example:
        >>> import torch
        >>> from commhooks import Plain
        >>> from commhooks.simulate import simulate
        >>> def body(rank):
        ...     torch.manual_seed(0)
        ...     model = torch.nn.Linear(4, 1, bias=False)
        ...     inner = torch.optim.AdamW(model.parameters(), lr=0.1)
        ...     optimizer = diloco(inner, model, every=2, exchange=Plain(), transport=rank.transport)
        ...     for _ in range(2):
        ...         optimizer.zero_grad()
        ...         model(torch.full((1, 4), 1.0 + rank.rank)).sum().backward()
        ...         optimizer.step()
        ...     return model.weight.tolist()
        >>> here, there = simulate(2, body)
        >>> here == there
        True
    """
    return OuterOptimizer(optim, model, **{"every": 500, "outer": nesterov(0.7, 0.9), **options})


def streaming_diloco(optim: torch.optim.Optimizer, model: torch.nn.Module, **options: Any) -> OuterOptimizer:
    """Streaming DiLoCo (arXiv:2501.18512): DiLoCo in four fragments at staggered steps, each exchange under way for five
    inner steps, half of a rank's own parameters kept on arrival.

    The paper's exchange is 4-bit: give ``exchange="quant4"`` (ch-quant) or any other. ``options`` as for :func:`diloco`.
    """
    given = {"every": 100, "fragments": 4, "overlap": 5, "mix": 0.5, "outer": nesterov(0.7, 0.9)}
    return OuterOptimizer(optim, model, **{**given, **options})


def sparseloco(
    optim: torch.optim.Optimizer, model: torch.nn.Module, *, density: float = 0.02, decay: float = 0.95, **options: Any
) -> OuterOptimizer:
    """SparseLoCo (arXiv:2508.15706): the largest entries of each chunk of the pseudo-gradient plus a decaying residual, two
    bits and a place each, then plain SGD. Needs ch-sparse, whose ``topk`` it exchanges.

    Args:
        optim: the inner optimizer.
        model: whose parameters it steps.
        density: part of the entries sent.
        decay: of the residual per round: what was not sent for long came from weights that have moved on since.
        **options: of :class:`OuterOptimizer`, in place of the paper's.
    """
    exchange = {"hook": "topk", "config": {"density": density, "decay": decay, "bits": 2}}
    return OuterOptimizer(optim, model, **{"every": 30, "exchange": exchange, "outer": plain_sgd(1.0), **options})


def muloco(optim: torch.optim.Optimizer, model: torch.nn.Module, **options: Any) -> OuterOptimizer:
    """MuLoCo (arXiv:2505.23725): DiLoCo around Muon, whose steps survive coarse exchanges better than AdamW's.

    The inner Muon is yours (``torch.optim.Muon`` takes matrices only): wrap it, and step the AdamW of the other parameters
    just before; all of the model's parameters are exchanged, whoever steps them. ``options`` as for :func:`diloco`.
    """
    return OuterOptimizer(optim, model, **{"every": 30, "outer": nesterov(0.7, 0.6), **options})
