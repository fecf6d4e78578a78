"""An optimizer that steps only when the step is committed, and says so to whoever must know.

A learning-rate schedule that counts attempts drifts from the other members', and a hook that keeps the residual of a
dropped step adds it twice; both are told here what the vote was.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import Optimizer

from ch_ft.protocols import Manager
from ch_ft.transaction import voters


class OptimizerWrapper(Optimizer):
    """Wraps an optimizer: ``zero_grad()`` begins a step, ``step()`` ends it with a vote.

    The hooks of all models over the same manager are told of the vote by themselves.

    Args:
        manager: torchft's Manager, or a simulated one.
        optim: the optimizer to wrap.
        schedulers: learning-rate schedulers (made for ``optim``), stepped only when the step is committed. Put their
            ``state_dict`` into what the manager transfers: a healed member needs the group's learning rate.
        listeners: called with the outcome of every step.

    Attributes:
        committed: outcome of the last step; ``None`` before the first.
        commits, drops: how many steps went each way.

    Example:
        >>> import torch
        >>> from ch_ft import SimulatedCluster
        >>> with SimulatedCluster() as cluster:
        ...     manager = cluster.join("a")
        ...     weight = torch.nn.Parameter(torch.ones(1))
        ...     optimizer = OptimizerWrapper(manager, torch.optim.SGD([weight], lr=0.5))
        ...     optimizer.zero_grad()
        ...     (weight * 1.0).sum().backward()
        ...     optimizer.step(), weight.item(), manager.current_step()
        (True, 0.5, 1)
    """

    def __init__(
        self,
        manager: Manager,
        optim: Optimizer,
        *,
        schedulers: Iterable[Any] = (),
        listeners: Iterable[Callable[[bool], object]] = (),
    ) -> None:
        self.manager = manager
        self.optim = optim
        self.schedulers = list(schedulers)
        self.listeners = list(listeners)
        self.committed: bool | None = None
        self.commits = self.drops = 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Ask for a quorum, and clear the gradients."""
        self.manager.start_quorum()
        self.optim.zero_grad(set_to_none)

    def step(self, closure: None = None) -> bool:  # type: ignore[override]
        """Vote, and step if the step is committed; returns whether it was.

        Raises:
            ValueError: a closure was given; it would run the backward pass after the vote.
        """
        if closure is not None:
            raise ValueError("a closure runs backward inside step(), after the vote; call step() without one")
        told = voters(self.manager)
        for voter in told:
            voter.before_vote()
        committed = bool(self.manager.should_commit())
        for voter in told:
            voter.after_vote(committed)
        if committed:
            self.optim.step()
            for scheduler in self.schedulers:
                scheduler.step()
        self.committed = committed
        self.commits += committed
        self.drops += not committed
        for listener in self.listeners:
            listener(committed)
        return committed

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.optim.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        return self.optim.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optim.load_state_dict(state_dict)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.optim.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.optim.state

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("an OptimizerWrapper holds a live manager and cannot be copied or pickled; copy .optim")

    def __repr__(self) -> str:
        return f"OptimizerWrapper({torch.typename(self.optim)}, commits={self.commits}, drops={self.drops})"
