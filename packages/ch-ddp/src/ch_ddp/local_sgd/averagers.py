"""Averages parameters over all ranks every few steps, or over groups of growing size.

With local SGD each rank takes ``period`` optimizer steps alone, and then ranks average their parameters (Stich 2019,
arXiv:1805.09767). Hierarchical SGD averages small groups often and all ranks seldom (Lin et al. 2020,
arXiv:1808.07217; Wang et al. 2022, arXiv:2010.12998).

Both averagers average first at step ``warmup_steps``, and then every ``period`` steps. PyTorch's hierarchical averager
counts from step 0: after 10 steps of warm-up and with a period of 8, it waits until step 16. Both can be created before
the process group.
"""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from ch_core import TUNED, ProcessGroupTransport
from ch_ddp.local_sgd.subgroups import has_default_group, part_of
from commhooks import HookConfigError, StateError

Params = Iterable[torch.Tensor] | Iterable[Mapping[str, Any]]
"""Parameters, or an optimizer's ``param_groups``."""


def average_parameters(params: Params, process_group: dist.ProcessGroup | None = None) -> None:
    """Set every parameter to its average over the group.

    All trainable parameters take part, with or without a gradient, so that ranks that used different parameters exchange
    messages of one size. An empty list, or a rank outside the group, does nothing.

    Args:
        params: parameters, or an optimizer's ``param_groups``.
        process_group: the group to average over; ``None`` is the default group.

    Raises:
        ValueError: a parameter has no average (an integer).
        TransportError: there is no process group, or the collective failed.

    Example:
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> model = torch.nn.Linear(2, 2)
        >>> before = model.weight.detach().clone()
        >>> average_parameters(model.parameters())
        >>> torch.equal(before, model.weight)
        True
        >>> dist.destroy_process_group()
    """
    together: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for p in trainable(params):
        together.setdefault((p.dtype, p.device), []).append(p)
    if process_group is not None and dist.get_rank(process_group) < 0:
        return
    transport = ProcessGroupTransport(process_group)
    with torch.no_grad():
        for same in together.values():
            flat = torch.cat([p.detach().reshape(-1) for p in same])
            flat.mul_(1.0 / transport.world_size)
            TUNED.wait(transport.all_reduce(torch.view_as_real(flat) if flat.is_complex() else flat, "sum"), flat, None)
            for p, piece in zip(same, flat.split([p.numel() for p in same]), strict=True):
                p.copy_(piece.view(p.shape))


def trainable(params: Params) -> list[torch.Tensor]:
    """Return the parameters that require a gradient, each once, in the given order.

    Raises:
        ValueError: a parameter is not floating-point or complex.
    """
    found: dict[int, torch.Tensor] = {}
    for entry in params:
        group = [entry] if isinstance(entry, torch.Tensor) else entry["params"]
        found |= {id(p): p for p in group if p.requires_grad}
    for p in found.values():
        if not (p.is_floating_point() or p.is_complex()):
            raise ValueError(f"a parameter of {p.dtype} and shape {tuple(p.shape)} has no average; leave it out")
    return list(found.values())


class ModelAverager(ABC):
    """Counts optimizer steps and averages parameters at some of them.

    Args:
        process_group: the group of all ranks; ``None`` is the default group.

    Attributes:
        step: calls of :meth:`average_parameters` so far.
    """

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        self.process_group = process_group
        self.step = 0

    @abstractmethod
    def average_parameters(self, params: Params) -> None:
        """Count a step, and average if an average is due. Call it on every rank after ``optimizer.step()``."""

    def state_dict(self) -> dict[str, Any]:
        """Return the step count."""
        return {"step": self.step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of :meth:`state_dict`.

        Raises:
            StateError: it has no step count.
        """
        if not isinstance(state.get("step"), int):
            raise StateError(f"this is not the state of an averager: 'step' is {state.get('step')!r}, not a number")
        self.step = state["step"]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "process_group": None}


class PeriodicModelAverager(ModelAverager):
    """Averages over all ranks at step ``warmup_steps`` and every ``period`` steps from there.

    Args:
        period: steps between two averages; 1 averages at every step.
        warmup_steps: steps before the first average, in which gradients are averaged.
        process_group: the ranks to average over; ``None`` is the default group.

    Raises:
        HookConfigError: ``period`` is not positive, or ``warmup_steps`` is negative.

    Example:
        >>> averager = PeriodicModelAverager(period=4, warmup_steps=13)
        >>> [step for step in range(24) if averager.due(step)]
        [13, 17, 21]
    """

    def __init__(self, period: int, warmup_steps: int = 0, process_group: dist.ProcessGroup | None = None) -> None:
        super().__init__(process_group)
        _check_steps({"period": period}, warmup_steps)
        self.period, self.warmup_steps = period, warmup_steps
        if period == 1:
            _warn_of_period_1("period")

    def due(self, step: int) -> bool:
        """Return True if an average is due at a step."""
        return step >= self.warmup_steps and (step - self.warmup_steps) % self.period == 0

    def average_parameters(self, params: Params) -> None:
        if self.due(self.step):
            average_parameters(params, self.process_group)
        self.step += 1


class HierarchicalModelAverager(ModelAverager):
    """Averages over groups of consecutive ranks, larger ones less often.

    If several periods fall on one step, only the largest group averages, because it includes the smaller groups. For a single
    level over all ranks use :class:`PeriodicModelAverager`.

    Args:
        period_group_size_dict: period -> ranks per group, both growing, groups of equal size allowed; the last group is
            all ranks.
        warmup_steps: steps before the first average.
        process_group: the group of all ranks; ``None`` is the default group.

    Raises:
        HookConfigError: the order does not grow, or the sizes do not divide each other and the group.

    It creates groups as soon as a process group exists: in the constructor, or at the first step.

    Example:
        >>> averager = HierarchicalModelAverager({2: 4, 8: 16}, warmup_steps=1)
        >>> {step: averager.group_size(step) for step in range(10) if averager.group_size(step)}
        {1: 16, 3: 4, 5: 4, 7: 4, 9: 16}
    """

    def __init__(
        self,
        period_group_size_dict: Mapping[int, int] | None = None,
        warmup_steps: int = 0,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(process_group)
        levels = dict(period_group_size_dict or {})
        if not levels:
            raise HookConfigError("HierarchicalModelAverager needs period -> group size, for example {2: 4, 8: 16}")
        _check_steps({"period": min(levels), "group size": min(levels.values())}, warmup_steps)
        periods, sizes = list(levels), list(levels.values())
        for what, row in (("periods", periods), ("group sizes", sizes)):
            if row != sorted(row):  # equal sizes are legal: {2: 2, 4: 4, 8: 4} over 4 ranks, as PyTorch takes it
                raise HookConfigError(f"the {what} {row} must grow: small groups average often, large ones seldom")
        if periods[-1] == 1:
            _warn_of_period_1("the largest period")
        self.levels, self.warmup_steps = levels, warmup_steps
        self.period_process_group_dict: dict[int, dist.ProcessGroup] = {}
        if has_default_group():
            self._make_groups()

    def group_size(self, step: int) -> int | None:
        """Return the ranks per group that average at a step, or None if no average is due."""
        period = self._period(step)
        return None if period is None else self.levels[period]

    def average_parameters(self, params: Params) -> None:
        if not self.period_process_group_dict:
            self._make_groups()
        period = self._period(self.step)
        if period is not None:
            average_parameters(params, self.period_process_group_dict[period])
        self.step += 1

    def _period(self, step: int) -> int | None:
        """Return the largest period that falls on a step, counted from the end of the warm-up."""
        since = step - self.warmup_steps
        return max((period for period in self.levels if since >= 0 and since % period == 0), default=None)

    def _make_groups(self) -> None:
        world = dist.get_world_size(self.process_group)
        largest = max(self.levels.values())
        if largest != world:
            raise HookConfigError(f"the last group size is {largest}, but there are {world} ranks: it has to be all")
        parts = {size: part_of(self.process_group, size, type(self).__name__) for size in self.levels.values()}
        self.period_process_group_dict = {period: parts[size] for period, size in self.levels.items()}

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "period_process_group_dict": {}}


def _warn_of_period_1(what: str) -> None:
    warnings.warn(
        f"{what} is 1: parameters averaged at every step cost no less than the gradients that DistributedDataParallel "
        "averages; no model averaging is needed",
        stacklevel=3,  # the caller that created the averager
    )


def _check_steps(positive: Mapping[str, int], warmup_steps: int) -> None:
    for name, value in positive.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise HookConfigError(f"{name}={value!r}: expected a whole number, 1 or more")
    if isinstance(warmup_steps, bool) or not isinstance(warmup_steps, int) or warmup_steps < 0:
        raise HookConfigError(f"warmup_steps={warmup_steps!r}: expected a whole number, 0 or more")
