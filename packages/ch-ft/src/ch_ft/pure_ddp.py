"""Averaging without DDP's reducer: one all-reduce per gradient, waited for before ``backward()`` returns.

torchft's class of this name starts its all-reduces and waits for none; the mean is made in the wait, so its replicas
train on sums, on parts of sums, or on their own gradients.
"""

from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from ch_ft.failfast import FailFast
from ch_ft.plain_average import Averaging
from ch_ft.protocols import Abortable, Reducer
from commhooks.adapters import backward_id


class PureDistributedDataParallel(nn.Module):
    """Averages every gradient over the manager, with torchft's name and signature.

    Simple and slow: for small models, for parameters that DDP cannot hold, and to compare with. All members must use
    the same parameters in the same order. A parameter that is thawed or added later is averaged from the next forward of
    this model on. Takes no hook.

    Args:
        manager: torchft's Manager, or any :class:`~ch_ft.Reducer`.
        module: the module to train.
        process_group, fail_fast: as for :class:`~ch_ft.DistributedDataParallel`.

    Example:
        >>> import torch
        >>> from ch_ft import SimulatedCluster
        >>> with SimulatedCluster() as cluster:
        ...     manager = cluster.join("a")
        ...     manager.start_quorum()
        ...     model = PureDistributedDataParallel(manager, torch.nn.Linear(2, 1))
        ...     model(torch.ones(1, 2)).sum().backward()
        ...     model.module.weight.grad
        tensor([[1., 1.]])
    """

    def __init__(
        self,
        manager: Reducer,
        module: nn.Module,
        *,
        process_group: Abortable | None = None,
        fail_fast: bool = True,
    ) -> None:
        super().__init__()
        self.module = module
        self.averaging = Averaging(manager, FailFast(manager, process_group, fail_fast))
        self._task = -1
        self._watched = WeakIdKeyDictionary()  # parameter -> True
        self._watch()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._watch()
        return self.module(*args, **kwargs)

    def _watch(self) -> None:
        """Watch the parameters that require a gradient by now: torch puts no such hook on a frozen one."""
        for parameter in self.module.parameters():
            if parameter.requires_grad and parameter not in self._watched:
                parameter.register_post_accumulate_grad_hook(self._gradient_ready)
                self._watched[parameter] = True

    def _gradient_ready(self, parameter: torch.Tensor) -> None:
        task = backward_id()
        if task != self._task:
            self._task = task
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)
        if parameter.grad is not None:
            self.averaging.start(parameter.grad)

    def _finish(self) -> None:
        self.averaging.finish()
