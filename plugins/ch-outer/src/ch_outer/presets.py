"""Published methods as options of one :class:`~ch_outer.OuterOptimizer`. Options of the caller override those of the paper.

Each preset takes an inner optimizer, its model and options, and returns an outer optimizer. ``commhooks run --outer`` finds
the presets by name.
"""

from dataclasses import fields
from typing import Any

import torch

from ch_outer.fixed_ranks import FixedRanks
from ch_outer.optimizer import OuterOptimizer
from ch_outer.options import NAMES
from ch_outer.outer_sgd import nesterov, plain_sgd
from ch_outer.schedule import Schedule
from commhooks import HookConfigError


def _preset(name: str, optim: torch.optim.Optimizer, model: torch.nn.Module, options: dict[str, Any]) -> OuterOptimizer:
    """Return an outer optimizer with the values of a paper, where the caller gives no others."""
    given: dict[str, Any] = {**NAMES[name], **{key: value for key, value in options.items() if value is not None}}

    def take(made: type[Schedule] | type[FixedRanks]) -> Any:
        return made(**{field.name: given.pop(field.name) for field in fields(made) if field.name in given})

    schedule = take(Schedule)
    if "ranks" not in given:
        given["ranks"] = take(FixedRanks)
    rate, momentum = given.pop("rate"), given.pop("momentum")
    steps = given.get("steps")
    if steps is not None and (type(steps) is not int or steps < 1):
        raise HookConfigError(f"steps={steps!r}: expected the number of inner steps of the run, at least 1")
    given.setdefault("outer", nesterov(rate, momentum) if momentum else plain_sgd(rate))
    return OuterOptimizer(optim, model, schedule, **given)


def diloco(optim: torch.optim.Optimizer, model: torch.nn.Module, **options: Any) -> OuterOptimizer:
    """DiLoCo (arXiv:2311.08105): the exact mean every 500 inner AdamW steps, then Nesterov with 0.7 and 0.9.

    These values need hundreds of rounds. Give ``steps=`` for a warning at the start of a shorter run.

    Args:
        optim: the inner optimizer.
        model: the model whose parameters it steps.
        **options: options of :class:`OuterOptimizer`, :class:`Schedule` and :class:`FixedRanks` by name, or the outer ``rate``
            and ``momentum``, instead of the paper's.

    Example:
        >>> import torch
        >>> from commhooks import Plain
        >>> from ch_core import simulate
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
    return _preset("diloco", optim, model, options)


def streaming_diloco(optim: torch.optim.Optimizer, model: torch.nn.Module, **options: Any) -> OuterOptimizer:
    """Streaming DiLoCo (arXiv:2501.18512): DiLoCo in four fragments that take turns.

    Each exchange has five inner steps to arrive, and half of a rank's own parameters stays on arrival. The paper exchanges
    4 bits; use ``exchange="quant4"`` (ch-quant) for that. Arguments are those of :func:`diloco`.
    """
    return _preset("streaming", optim, model, options)


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
        **options: as in :func:`diloco`.
    """
    exchange = {"hook": "topk", "config": {"density": density, "decay": decay, "bits": 2}}
    return _preset("sparse_loco", optim, model, {"exchange": exchange, **options})


def muloco(optim: torch.optim.Optimizer, model: torch.nn.Module, **options: Any) -> OuterOptimizer:
    """MuLoCo (arXiv:2505.23725): DiLoCo around Muon, whose steps survive coarse exchanges better than AdamW's.

    ``torch.optim.Muon`` takes matrices only. Wrap it, and step the AdamW of the other parameters just before. All parameters of
    the model are exchanged. Arguments are those of :func:`diloco`.
    """
    return _preset("muloco", optim, model, options)


def local_sgd(optim: torch.optim.Optimizer, model: torch.nn.Module, **options: Any) -> OuterOptimizer:
    """Local SGD (arXiv:1805.09767): the ranks average their parameters every eight steps.

    With a lossy exchange they average their moves since the last round. Arguments are those of :func:`diloco`.

    Example:
        >>> import torch
        >>> from ch_core import simulate
        >>> def body(rank):
        ...     model = torch.nn.Linear(1, 1, bias=False)
        ...     torch.nn.init.ones_(model.weight)
        ...     inner = torch.optim.SGD(model.parameters(), lr=0.5)
        ...     optimizer = local_sgd(inner, model, every=1, transport=rank.transport)
        ...     model(torch.full((1, 1), 1.0 + rank.rank)).sum().backward()  # gradients of 1 and 2
        ...     optimizer.step()
        ...     return model.weight.item()
        >>> simulate(2, body)
        [0.25, 0.25]
    """
    return _preset("local_sgd", optim, model, options)
