"""The model, the inner optimizer and its schedule that the programs of this folder train with."""

from collections.abc import Iterable
from typing import Any

import torch

from ch_bench import gpt

WINDOWS = 128
"""Windows of held-out text."""
WARM = 50
"""Steps of the learning rate's warm-up."""


def make_net(settings: dict[str, Any], vocab: int) -> gpt.GPT:
    """Return the GPT of a run's settings ``width``, ``layers`` and ``context``."""
    width = settings["width"]
    return gpt.GPT(vocab, settings["context"], width, settings["layers"], heads=max(1, width // 32))


def adamw(params: Iterable[torch.Tensor], lr: float) -> torch.optim.AdamW:
    """Return the inner optimizer."""
    return torch.optim.AdamW(params, lr=lr, betas=(0.9, 0.95), weight_decay=0.01)


def set_rate(optimizer: torch.optim.Optimizer, lr: float, step: float) -> None:
    """Set the learning rate of a step, counted from 1: a warm-up, then the inverse square root of the step.

    >>> optimizer = adamw([torch.zeros(1)], 1.0)
    >>> set_rate(optimizer, 0.5, 200)
    >>> optimizer.param_groups[0]["lr"]
    0.25
    """
    for group in optimizer.param_groups:
        group["lr"] = lr * min(step / WARM, (WARM / step) ** 0.5)
