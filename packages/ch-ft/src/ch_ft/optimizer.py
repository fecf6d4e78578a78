"""Optimizer that steps only if the manager commits the step.

A learning-rate schedule that counted attempts would drift from the schedules of other members. Schedules given here
count committed steps.
"""

from collections.abc import Callable, Iterable
from typing import Any, overload

import torch
from torch.optim import Optimizer

from ch_ddp import WrappedOptimizer, needs_closure, unscale
from ch_ft.manager import Manager
from commhooks import HookConfigError


class OptimizerWrapper(WrappedOptimizer):
    """Wraps an optimizer. ``zero_grad()`` begins a step, and ``step()`` ends it with a vote.

    Several backwards may lie between the two. The vote commits or drops all of them, and the hooks of all models over
    the same manager follow it. Schedulers, frameworks and ``GradScaler`` take it as an optimizer. If the scaler finds
    Inf or NaN, the step is voted down, so a healing member heals in it too. Step hooks run when the wrapped optimizer
    steps, on committed steps only.

    Args:
        manager: torchft's Manager, or a simulated one.
        optim: the optimizer to wrap.
        schedulers: learning-rate schedulers (made for ``optim`` or for this), stepped only when the step is committed.
            Register their ``state_dict`` with the manager, and the one of the ``GradScaler``. A healed member needs the
            group's learning rate and loss scale.

    Attributes:
        committed: True if the last step was committed; ``None`` before the first.
        commits, drops: numbers of committed and dropped steps.

    Raises:
        HookConfigError: ``optim`` is not an optimizer, or needs a closure (LBFGS) and would run backwards after the vote.

    Example:
        >>> import torch
        >>> from ch_testing import SimulatedCluster
        >>> with SimulatedCluster() as cluster:
        ...     manager = cluster.join("a")
        ...     weight = torch.nn.Parameter(torch.ones(1))
        ...     optimizer = OptimizerWrapper(manager, torch.optim.SGD([weight], lr=0.5))
        ...     optimizer.zero_grad()
        ...     (weight * 1.0).sum().backward()
        ...     optimizer.step(), weight.item(), manager.current_step()
        (True, 0.5, 1)
    """

    # With this, GradScaler always calls step() and passes `found_inf`. Without it, a member that finds Inf would not vote, and
    # torchft loads a healing member's state in the vote.
    _step_supports_amp_scaling = True

    def __init__(self, manager: Manager, optim: Optimizer, *, schedulers: Iterable[Any] = ()) -> None:
        super().__init__(optim)
        if needs_closure(optim):
            raise HookConfigError(
                f"{type(optim).__name__} evaluates the model inside step(), after the vote. Use an optimizer whose step() "
                "needs no closure"
            )
        self.manager = manager
        self.schedulers = list(schedulers)
        self.committed: bool | None = None
        self.commits = self.drops = 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Start a quorum, and clear the gradients."""
        self.manager.start_quorum()
        super().zero_grad(set_to_none)

    @overload  # type: ignore[override]
    def step(self, closure: None = None) -> bool: ...

    @overload
    def step(self, closure: Callable[[], Any]) -> Any: ...

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Vote, and step if the step is committed.

        Args:
            closure: called once, before the vote. Lightning runs forward and backward in it.

        Returns:
            True if the step was committed. With a closure, the closure's result; see :attr:`committed` then.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        committed = self._vote()
        if committed:
            unscale(self.optim, getattr(self, "grad_scale", None))  # a GradScaler sets it if it leaves that to step()
            self.inner_step()
            for scheduler in self.schedulers:
                scheduler.step()
        self.committed = committed
        self.commits += committed
        self.drops += not committed
        return committed if closure is None else loss

    step.hooked = True  # type: ignore[attr-defined]  # otherwise torch runs step hooks at dropped steps too

    def _vote(self) -> bool:
        found: torch.Tensor | None = getattr(self, "found_inf", None)
        if found is not None and found.item():
            self.manager.report_error(FloatingPointError("GradScaler found Inf or NaN: the step is tried again"))
        return bool(self.manager.should_commit())

    def register_step_pre_hook(self, hook: Any) -> Any:
        return self.optim.register_step_pre_hook(hook)

    def register_step_post_hook(self, hook: Any) -> Any:
        return self.optim.register_step_post_hook(hook)

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("an OptimizerWrapper holds a live manager and cannot be copied or pickled; copy .optim")

    def __repr__(self) -> str:
        return f"OptimizerWrapper({torch.typename(self.optim)}, commits={self.commits}, drops={self.drops})"
