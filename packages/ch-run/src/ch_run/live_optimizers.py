"""Tracks the optimizers of this process, so that a model's optimizers are known before their first step.

The first step would be too late for an outer optimizer. A `GradScaler` often skips it, and calls no method of the optimizer
then.
"""

import functools
import weakref
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_made: "weakref.WeakKeyDictionary[torch.optim.Optimizer, None]" = weakref.WeakKeyDictionary()  # in order of creation


def watch_optimizers(module: ModuleType) -> None:
    """Remember each optimizer that is made or unpickled from now on.

    Args:
        module: `torch.optim.optimizer`.
    """
    cls = module.Optimizer
    for name in ("__init__", "__setstate__"):
        setattr(cls, name, _remembering(getattr(cls, name)))


def _remembering(method: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(method)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> None:
        method(self, *args, **kwargs)
        _made.setdefault(self, None)

    return wrapped


def optimizers_of(params: "Iterable[torch.Tensor]") -> "list[torch.optim.Optimizer]":
    """Return the optimizers that step one of the parameters, in the order of their creation."""
    mine = {id(param) for param in params}
    return [one for one in list(_made) if any(id(p) in mine for group in one.param_groups for p in group["params"])]
