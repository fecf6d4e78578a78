"""Counts the steps of a model's optimizers by torch's hooks around ``step()`` of every optimizer."""

import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from ch_core import HostCopy
from commhooks.adapters.model_optimizers import ModelOptimizers

P = ParamSpec("P")
T = TypeVar("T")


class OptimizerSteps:
    """Records which optimizers of a model have stepped in a period, step now, or run a closure.

    Args:
        optimizers: the optimizers that count.
        begins: called before the step of an optimizer that holds parameters of the model, not inside of another step.
        late_error: returns an error that the step of an optimizer raises before it changes a parameter.

    Attributes:
        ever: True once an optimizer has stepped.
        refusal: returns the error that an optimizer raises before its first step, or ``None``.
    """

    def __init__(
        self,
        optimizers: ModelOptimizers,
        begins: Callable[[], None],
        late_error: Callable[[], BaseException | None] | None,
    ) -> None:
        self._optimizers, self._begins, self._late_error = optimizers, begins, late_error
        self._running: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()  # optimizers inside of step()
        self._closures = 0  # closures that optimizers run now
        self._earlier = 0  # optimizer steps before this period
        self._steps: dict[int, int] = {}  # id(optimizer) -> its steps in this period
        self.ever = False
        self.refusal: Callable[[torch.optim.Optimizer], BaseException | None] = lambda optimizer: None
        self.begin_period()
        _every_step.add(self)

    def begin_period(self) -> None:
        """Begin a period, of which :meth:`used` tells."""
        self._earlier = self.clock()
        self._steps = {}
        self._stepped = False  # an optimizer has stepped that is not fused, or has not found Inf
        self._found_inf: list[HostCopy] = []  # one for each fused step; 0 if it ran

    def clock(self) -> int:
        """Return the steps since the beginning. Optimizers that are nested, or step in turn, count once."""
        return self._earlier + max(self._steps.values(), default=0)

    def set_clock(self, clock: int) -> None:
        """Count on from this number."""
        self._earlier = clock
        self._steps.clear()

    @property
    def begun(self) -> bool:
        """True if an optimizer has ended a step in this period, or runs a closure."""
        return bool(self._steps or self._closures)

    def used(self) -> bool | None:
        """Return True if a step uses gradients, False if all steps were fused and found Inf, ``None`` without a step."""
        if self._stepped or self._closures or self._running:
            return True
        if not self._found_inf:
            return None
        # On a GPU the host waits here for the fused step, not for later work.
        if all(any(found.values()) for found in self._found_inf):
            return False
        self._stepped = self.ever = True
        return True

    def backward_begins(self) -> None:
        """Forget a step that raised, and has called no post hook."""
        if not self._closures:
            self._running.clear()

    def close(self) -> None:
        """Stop watching optimizers."""
        _every_step.remove(self)

    def before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Begin a step of any optimizer. Return its arguments, with a closure that is counted."""
        if not self._optimizers.counts(optimizer):
            return args, kwargs
        error = self._late_error() if self._late_error is not None else None
        if error is None and not self._optimizers.knows(optimizer):
            error = self.refusal(optimizer)
        if error is not None:  # the optimizer has changed no parameter yet
            raise error
        if optimizer in self._running:
            self._running.clear()  # its last step raised
        if not self._running and self._optimizers.holds_ours(optimizer):
            self._begins()
        self._optimizers.add(optimizer)
        self._running.add(optimizer)
        return self._with_counted_closure(args, kwargs)

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """End a step of any optimizer."""
        if not self._optimizers.counts(optimizer):
            return
        self._running.discard(optimizer)
        self._steps[id(optimizer)] = self._steps.get(id(optimizer), 0) + 1
        found_inf = getattr(optimizer, "found_inf", None)  # set only while a GradScaler runs a fused step
        if not isinstance(found_inf, torch.Tensor):
            self._stepped = self.ever = True
        elif not self._stepped:
            self._found_inf.append(HostCopy(found_inf))

    def _with_counted_closure(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of ``step()`` with a counted closure, because the step uses backwards of its closure."""
        if callable(kwargs.get("closure")):
            return args, {**kwargs, "closure": self._counted(kwargs["closure"])}
        if len(args) > 1 and callable(args[1]):
            return (args[0], self._counted(args[1]), *args[2:]), kwargs
        return args, kwargs

    def _counted(self, closure: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(closure)
        def counted(*args: P.args, **kwargs: P.kwargs) -> T:
            self._closures += 1
            try:
                return closure(*args, **kwargs)
            finally:
                self._closures -= 1

        return counted


class _EveryStep:
    """Tells the living :class:`OptimizerSteps` of the steps of every optimizer.

    torch's hooks are registered once and stay. torch iterates over them while they run, so if another thread or the garbage
    collector removed one, the step of a user's optimizer would raise.
    """

    def __init__(self) -> None:
        # Replaced as a whole, because steps iterate over it.
        self._watches: tuple[weakref.ref[OptimizerSteps], ...] = ()
        self._lock = threading.RLock()
        self._hooked = False

    def living(self) -> list[OptimizerSteps]:
        """Return those that watch, the oldest first."""
        return [watch for each in self._watches if (watch := each()) is not None]

    def add(self, watch: OptimizerSteps) -> None:
        with self._lock:
            if not self._hooked:
                self._hooked = True
                register_optimizer_step_pre_hook(torch.compiler.disable(self._before_step))
                register_optimizer_step_post_hook(torch.compiler.disable(self._after_step))
            self._watches = tuple(weakref.ref(each) for each in (*self.living(), watch))

    def remove(self, watch: OptimizerSteps) -> None:
        with self._lock:
            self._watches = tuple(weakref.ref(each) for each in self.living() if each is not watch)

    def _before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        for watch in self.living():
            args, kwargs = watch.before_step(optimizer, args, kwargs)
        return args, kwargs

    def _after_step(self, optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        for watch in self.living():
            watch.after_step(optimizer)


_every_step = _EveryStep()


def watching() -> list[OptimizerSteps]:
    """Return those that watch the steps of optimizers, the oldest first."""
    return _every_step.living()


def weak_call(this: "weakref.ref[Any]", method: Any) -> Any:
    """Return a function that calls a method while its object lives. A compiled ``optimizer.step`` does not trace it."""

    def call(*args: Any) -> Any:
        owner = this()
        return None if owner is None else method(owner, *args)

    return torch.compiler.disable(call)


def remove_hooks(hooks: list[RemovableHandle]) -> None:
    """Remove hooks from optimizers, parameters and modules."""
    for hook in hooks:
        hook.remove()
    hooks.clear()
