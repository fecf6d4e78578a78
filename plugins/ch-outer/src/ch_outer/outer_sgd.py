"""Outer optimizers, and the number of rounds that their momentum needs.

An outer optimizer steps the starts once per round, with the averaged pseudo-gradient as gradient. Any torch optimizer can do
so. DiLoCo (arXiv:2311.08105) uses SGD with Nesterov momentum.
"""

import warnings
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch.optim import Optimizer

OuterFactory = Callable[[Sequence[torch.Tensor]], Optimizer]
"""Makes the outer optimizer of the starts, which come in model order."""

_ROUNDS = 60.0
"""Rounds that momentum 0.5 needs to beat plain averaging; measured between 38 and 150 (docs/measured/outer-quality.md)."""


def nesterov(rate: float = 0.7, momentum: float = 0.9) -> OuterFactory:
    """Return a factory of SGD with Nesterov momentum.

    The step is ``v = momentum * v + delta``, then ``start -= rate * (delta + momentum * v)``. The defaults are DiLoCo's, tuned
    for runs of tens of thousands of steps. They need hundreds of rounds.

    >>> nesterov(0.5)([torch.zeros(1)]).param_groups[0]["lr"]
    0.5
    """
    return partial(torch.optim.SGD, lr=rate, momentum=momentum, nesterov=True)


def plain_sgd(rate: float = 1.0) -> OuterFactory:
    """Return a factory of SGD without momentum. At rate 1 the start becomes the average of the ranks' parameters."""
    return partial(torch.optim.SGD, lr=rate)


def default_outer() -> OuterFactory:
    """Return the default, Nesterov SGD of rate 1 and momentum 0.3.

    In runs of 10 to 150 rounds its loss was at most 3.2 % above that of the best of five settings. Each of the others was up to
    8 to 16 % above (docs/measured/outer-quality.md).
    """
    return nesterov(1.0, 0.3)


def momentum_of(outer: Optimizer) -> float:
    """Return the largest momentum of an optimizer, or of Adam its first beta.

    >>> momentum_of(nesterov(0.7, 0.9)([torch.zeros(1)]))
    0.9
    """
    found = [0.0]
    for group in outer.param_groups:
        found.append(float(group.get("momentum", group["betas"][0] if "betas" in group else 0.0)))
    return max(found)


def rounds_needed(momentum: float) -> int:
    """Return the number of rounds from which this outer momentum can pay.

    It is proportional to ``momentum / (1 - momentum)``, the weight of all earlier rounds in one step.

    >>> rounds_needed(0.0), rounds_needed(0.5), rounds_needed(0.9)
    (0, 60, 540)
    """
    return round(_ROUNDS * momentum / (1.0 - momentum)) if momentum < 1.0 else 0


def warn_of_short_run(outer: Optimizer, rounds: int) -> None:
    """Warn if a run has too few rounds for the momentum of its outer optimizer."""
    momentum = momentum_of(outer)
    if rounds < rounds_needed(momentum):
        warnings.warn(
            f"{rounds} rounds are few for an outer momentum of {momentum:g}, which needs about {rounds_needed(momentum)}. "
            "Runs this short end with a higher loss than plain averaging. Use outer=plain_sgd(1.0) (in an expression "
            "rate=1.0, momentum=0.0), less momentum, or more rounds",
            UserWarning,
            stacklevel=3,
        )
