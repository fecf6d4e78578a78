"""The arguments of :func:`commhooks.attach` that an adapter gets."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeGuard

import torch
import torch.distributed as dist

from ch_core import Link


class Scaler(Protocol):
    """The methods of a ``GradScaler`` that commhooks calls."""

    def is_enabled(self) -> bool:
        """Return False if the scale is always 1."""

    def get_scale(self) -> float:
        """Return the scale of the loss. On a GPU the host waits for it."""


FindOptimizers = Callable[[Iterable[torch.Tensor]], Sequence[torch.optim.Optimizer]]
"""Returns the optimizers, so far, that hold one of the parameters."""


@dataclass(frozen=True, slots=True)
class AttachOptions:
    """Arguments of :func:`commhooks.attach`. An adapter refuses arguments that it does not support.

    Attributes:
        process_group: group to reduce over; ``None`` for the group of the model.
        axis: axis to reduce along, for a model with several; ``None`` if the adapter chooses.
        optimizer, scaler: optimizer (or a function that finds all of them) and ``GradScaler`` that use the gradients, for
            :func:`watch_optimizer`.
        verify_ranks: True if the adapter may compare ranks. If not, it exchanges nothing before the first step.
        timeout: seconds that one collective may take.
        manager: manager of groups that join and leave, each of which holds the whole model. :func:`manager_adapter` finds
            what reduces between the groups. ``attach`` refuses a manager unless the adapter has ``takes_manager = True``.
        facts: further lines by name that all ranks must share, of a :class:`commhooks.Reducer`.
        link: slowest link between two ranks; ``None`` if they are near.
        rounds: function from the manager's committed steps to the number of steps in which the hook took part.
    """

    process_group: dist.ProcessGroup | None = None
    axis: str | None = None
    optimizer: torch.optim.Optimizer | FindOptimizers | None = None
    scaler: Scaler | None = None
    verify_ranks: bool = True
    timeout: float = 1800.0
    manager: object | None = None
    link: Link | None = None
    facts: Mapping[str, Sequence[str]] = field(default_factory=dict)
    rounds: Callable[[int], int] | None = None


def finds_optimizers(optimizer: object) -> TypeGuard[FindOptimizers]:
    """True if ``optimizer=`` is a function that finds optimizers. A module and a class can be called too, but are a mistake."""
    return inspect.isroutine(optimizer)
