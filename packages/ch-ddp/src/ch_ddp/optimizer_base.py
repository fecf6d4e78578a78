"""Base of optimizers that wrap another optimizer and share its groups and state."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from commhooks import HookConfigError

_SHARED = ("param_groups", "state", "defaults")


class WrappedOptimizer(Optimizer):
    """Base of optimizers that add something to :meth:`step`.

    ``param_groups``, ``state`` and ``defaults`` always come from the wrapped optimizer, also after ``load_state_dict``
    replaced them. Schedulers, ``GradScaler`` and step hooks work as with the wrapped optimizer.

    Args:
        optim: optimizer to wrap.

    Raises:
        HookConfigError: ``optim`` is no ``torch.optim.Optimizer``.
    """

    optim: Optimizer

    def __init__(self, optim: Optimizer) -> None:
        if not isinstance(optim, Optimizer):
            raise HookConfigError(f"got a {type(optim).__name__}. Give a torch.optim.Optimizer to wrap")
        super().__init__([{"params": list(group["params"])} for group in optim.param_groups], {})
        for name in _SHARED:  # so that __getattr__ finds those of the wrapped optimizer
            del self.__dict__[name]
        self.optim = optim

    def __getattr__(self, name: str) -> Any:
        if name in _SHARED and "optim" in self.__dict__:
            return getattr(self.optim, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        # Accelerate sets them. Attributes of this object would hide those of the wrapped one.
        if name in _SHARED and "optim" in self.__dict__:
            setattr(self.optim, name, value)
        else:
            super().__setattr__(name, value)

    def inner_step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Run the wrapped optimizer's step."""
        return self.optim.step() if closure is None else self.optim.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optim.zero_grad(set_to_none=set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if "optim" in self.__dict__:
            self.optim.add_param_group(param_group)
        else:  # called by Optimizer.__init__
            super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        return self.optim.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optim.load_state_dict(state_dict)

    def register_state_dict_pre_hook(self, hook: Any, prepend: bool = False) -> Any:
        return self.optim.register_state_dict_pre_hook(hook, prepend)

    def register_state_dict_post_hook(self, hook: Any, prepend: bool = False) -> Any:
        return self.optim.register_state_dict_post_hook(hook, prepend)

    def register_load_state_dict_pre_hook(self, hook: Any, prepend: bool = False) -> Any:
        return self.optim.register_load_state_dict_pre_hook(hook, prepend)

    def register_load_state_dict_post_hook(self, hook: Any, prepend: bool = False) -> Any:
        return self.optim.register_load_state_dict_post_hook(hook, prepend)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.optim!r})"

    def __getstate__(self) -> dict[str, Any]:
        return {"optim": self.optim}

    def __setstate__(self, state: dict[str, Any]) -> None:
        type(self).__init__(self, **state)


def needs_closure(optim: Optimizer) -> bool:
    """Return True if ``step()`` requires a closure, as that of LBFGS does."""
    parameters = inspect.signature(type(optim).step).parameters.values()
    return any(p.name == "closure" and p.default is p.empty for p in parameters)


def unscale(optim: Optimizer, scale: torch.Tensor | None) -> None:
    """Divide all gradients by the scale of a ``GradScaler``, to the bit as it does, unless it has done so."""
    if scale is not None:
        inverse = scale.double().reciprocal().float()
        for group in optim.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.grad.mul_(inverse.to(param.grad.device))
