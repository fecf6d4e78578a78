"""Refuses models over a manager under `commhooks run --outer`, and names the way to train them with an outer optimizer."""

from typing import NoReturn

import torch

from commhooks import HookNotSupportedError


def refuse(model: torch.nn.Module) -> NoReturn:
    """Refuse a model whose gradients a manager averages.

    Raises:
        HookNotSupportedError: always. The script votes on each step, and an outer optimizer has the manager vote on rounds.
    """
    raise HookNotSupportedError(
        f"--outer cannot train {type(model).__name__} over a manager: the script has the manager vote on every step, and an "
        "outer optimizer has it vote on every round. Make the optimizer in the script, on the plain module and without "
        "OptimizerWrapper: ch_outer.OuterOptimizer(optimizer, module, ch_outer.Schedule(30), ranks=ch_outer.Members(manager))"
    )
