"""Backwards that their caller finalises (``require_manual_backward_finalization``, torch 2.15).

An error that is raised from ``backward()`` keeps the caller from it, for all models whose gradients that backward made: each
would refuse every later one. So they are finalised before the error is raised.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any
from weakref import WeakSet, ref

from torch.nn.parallel import DistributedDataParallel

from commhooks.adapters import NO_BACKWARD, backward_id, raise_after_backward


class Finalizer:
    """Finalises the backward of one driver's model, if its caller would have done so.

    Args:
        models: gives the DDP model; nothing, or several, where it is not known for sure.
    """

    def __init__(self, models: Callable[[], Iterable[DistributedDataParallel | None]]) -> None:
        self._models = models
        self._backward = NO_BACKWARD
        _ALL.add(self)

    @classmethod
    def of(cls, model: DistributedDataParallel) -> "Finalizer":
        """For this model, while it lives."""
        return cls(partial(_only, ref(model)))

    def ready(self) -> None:
        """The last bucket of the running backward has come."""
        self._backward = backward_id()

    def after(self, backward: int) -> None:
        """Finalise what this backward has left to its caller."""
        if self._backward != backward:
            return
        self._backward = NO_BACKWARD
        for model in self._models():
            if model is not None and getattr(model, "require_manual_backward_finalization", False):
                finalize: Any = model.finalize_backward
                try:
                    finalize()
                except RuntimeError:  # done already, from a hook of this backward: the error to come tells more
                    continue


_ALL: WeakSet[Finalizer] = WeakSet()


def raise_finalized(error: BaseException) -> None:
    """Raise from ``backward()`` once DDP has finished, with all models of this backward finalised."""
    backward = backward_id()
    raise_after_backward(error, partial(_finalize, backward) if backward != NO_BACKWARD else None)


def _only(model: "ref[DistributedDataParallel]") -> list[DistributedDataParallel | None]:
    return [model()]


def _finalize(backward: int) -> None:
    for finalizer in list(_ALL):
        finalizer.after(backward)
