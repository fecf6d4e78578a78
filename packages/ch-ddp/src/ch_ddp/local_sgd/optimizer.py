"""Optimizer of local SGD, which averages parameters after its steps."""

import warnings
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from ch_ddp.local_sgd.averagers import ModelAverager
from ch_ddp.optimizer_base import WrappedOptimizer


class PostLocalSGDOptimizer(WrappedOptimizer):
    """Steps ``optim``, then lets ``averager`` average the parameters.

    Args:
        optim: the local optimizer.
        averager: decides at which steps and over which ranks to average.

    ``state_dict()`` is ``optim``'s with the averager's count under ``"step"``, as PyTorch writes it. It loads with
    ``weights_only=True``. Step hooks of this optimizer run before the step and after the averaging.

    Example:
        >>> import torch
        >>> from ch_ddp import PeriodicModelAverager
        >>> model = torch.nn.Linear(2, 2)
        >>> inner = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> optimizer = PostLocalSGDOptimizer(inner, PeriodicModelAverager(period=4, warmup_steps=100))
        >>> schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        >>> model(torch.ones(1, 2)).sum().backward()
        >>> optimizer.step()
        >>> schedule.step()
        >>> round(inner.param_groups[0]["lr"], 3), optimizer.state_dict()["step"]
        (0.01, 1)
    """

    def __init__(self, optim: Optimizer, averager: ModelAverager) -> None:
        super().__init__(optim)
        self.averager = averager

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step the local optimizer, then the averager. Return the result of ``closure``."""
        loss = self.inner_step(closure)
        self.averager.average_parameters(self.param_groups)
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Return the local optimizer's state dict, with the averager's count under ``"step"``."""
        return {**super().state_dict(), "step": self.averager.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the result of :meth:`state_dict`, or a local optimizer's own, with which the averager starts at 0."""
        super().load_state_dict({k: v for k, v in state_dict.items() if k != "step"})
        if "step" in state_dict:
            self.averager.load_state_dict({"step": state_dict["step"]})
        else:
            warnings.warn(  # PyTorch's words: its users filter and test for them
                "Loaded state dict does not contain a step counter for an averager. Setting step counter to 0.",
                stacklevel=2,
            )
            self.averager.step = 0

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "averager": self.averager}
