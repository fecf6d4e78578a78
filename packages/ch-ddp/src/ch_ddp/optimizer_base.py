"""An optimizer around another one: a real ``torch.optim.Optimizer`` that shares everything with what it wraps."""

import inspect
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from commhooks import HookConfigError

_SHARED = ("param_groups", "state", "defaults")


class WrappedOptimizer(Optimizer):
    """Base of optimizers that add something to :meth:`step`.

    ``param_groups``, ``state`` and ``defaults`` are the wrapped optimizer's own at every moment, also after
    ``load_state_dict``, which replaces them; schedulers, ``GradScaler`` and step hooks take this for the optimizer it
    is.

    Args:
        optim: the optimizer to wrap.

    Raises:
        HookConfigError: it is none.
    """

    optim: Optimizer

    def __init__(self, optim: Optimizer) -> None:
        if not isinstance(optim, Optimizer):
            raise HookConfigError(f"expected a torch.optim.Optimizer to wrap, got {type(optim).__name__}")
        super().__init__([{"params": list(group["params"])} for group in optim.param_groups], {})
        for name in _SHARED:  # from here on found by __getattr__
            del self.__dict__[name]
        self.optim = optim

    def __getattr__(self, name: str) -> Any:
        if name in _SHARED and "optim" in self.__dict__:
            return getattr(self.optim, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _SHARED and "optim" in self.__dict__:  # Accelerate sets them; here they would hide the wrapped one's
            setattr(self.optim, name, value)
        else:
            super().__setattr__(name, value)

    def inner_step(self, closure: Callable[[], Any] | None = None) -> Any:
        """The wrapped optimizer's step."""
        return self.optim.step() if closure is None else self.optim.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optim.zero_grad(set_to_none=set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if "optim" in self.__dict__:
            self.optim.add_param_group(param_group)
        else:  # from Optimizer.__init__
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
    """Whether ``step()`` cannot do without a closure: it evaluates the model several times, as LBFGS does."""
    parameters = inspect.signature(type(optim).step).parameters.values()
    return any(p.name == "closure" and p.default is p.empty for p in parameters)
