"""Published methods as options of one :class:`~ch_outer.OuterOptimizer`. Options of the caller override those of the paper.

Each preset takes an inner optimizer, its model and options, and returns an outer optimizer.
"""

from typing import Any

import torch

from ch_outer.optimizer import OuterOptimizer
from ch_outer.outer_sgd import nesterov, plain_sgd


def diloco(optim: torch.optim.Optimizer, model: torch.nn.Module, **options: Any) -> OuterOptimizer:
    """DiLoCo (arXiv:2311.08105): the exact mean every 500 inner AdamW steps, then Nesterov with 0.7 and 0.9.

    These values need hundreds of rounds. Give ``steps=`` for a warning at the start of a shorter run.

    Args:
        optim: the inner optimizer.
        model: the model whose parameters it steps.
        **options: options of :class:`OuterOptimizer`, instead of the paper's.

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
        >>> first, second = simulate(2, body)
        >>> first == second
        True
    """
    return OuterOptimizer(optim, model, **{"every": 500, "outer": nesterov(0.7, 0.9), **options})


def streaming_diloco(optim: torch.optim.Optimizer, model: torch.nn.Module, **options: Any) -> OuterOptimizer:
    """Streaming DiLoCo (arXiv:2501.18512): DiLoCo in four fragments that take turns.

    Each exchange has five inner steps to arrive, and half of a rank's own parameters stays on arrival. The paper exchanges
    4 bits; use ``exchange="quant4"`` (ch-quant) for that. Arguments are those of :func:`diloco`.
    """
    given = {"every": 100, "fragments": 4, "overlap": 5, "mix": 0.5, "outer": nesterov(0.7, 0.9)}
    return OuterOptimizer(optim, model, **{**given, **options})


def sparseloco(
    optim: torch.optim.Optimizer, model: torch.nn.Module, *, density: float = 0.02, decay: float = 0.95, **options: Any
) -> OuterOptimizer:
    """SparseLoCo (arXiv:2508.15706): the largest entries of the pseudo-gradient plus a decaying residual, then plain SGD.

    Each entry travels as two bits and a place. The exchange is ``topk`` of ch-sparse, which must be installed.

    Args:
        optim: the inner optimizer.
        model: the model whose parameters it steps.
        density: part of the entries that is sent.
        decay: factor of the residual per round. Old entries come from weights that have moved since.
        **options: options of :class:`OuterOptimizer`, instead of the paper's.
    """
    exchange = {"hook": "topk", "config": {"density": density, "decay": decay, "bits": 2}}
    return OuterOptimizer(optim, model, **{"every": 30, "exchange": exchange, "outer": plain_sgd(1.0), **options})


def muloco(optim: torch.optim.Optimizer, model: torch.nn.Module, **options: Any) -> OuterOptimizer:
    """MuLoCo (arXiv:2505.23725): DiLoCo around Muon, whose steps survive coarse exchanges better than AdamW's.

    ``torch.optim.Muon`` takes matrices only. Wrap it, and step the AdamW of the other parameters just before. All parameters of
    the model are exchanged. Arguments are those of :func:`diloco`.
    """
    return OuterOptimizer(optim, model, **{"every": 30, "outer": nesterov(0.7, 0.6), **options})
