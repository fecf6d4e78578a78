"""Manual finalization of DDP backwards (``require_manual_backward_finalization``, torch 2.15).

With this DDP option the caller must call ``finalize_backward()`` after ``backward()``. An error raised from ``backward()``
would skip that call, and the models would refuse every later backward. So this module finalizes them before it raises.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any
from weakref import WeakSet, ref

from torch.nn.parallel import DistributedDataParallel

from commhooks import NO_BACKWARD, backward_id, raise_after_backward


class Finalizer:
    """Finalizes the backward of one driver's model.

    Args:
        models: returns the DDP model. It returns none or several if the model is uncertain.
    """

    def __init__(self, models: Callable[[], Iterable[DistributedDataParallel | None]]) -> None:
        self._models = models
        self._backward = NO_BACKWARD
        _ALL.add(self)

    @classmethod
    def of(cls, model: DistributedDataParallel) -> "Finalizer":
        """Make the finalizer of one model, without keeping the model alive."""
        return cls(partial(_only, ref(model)))

    def last_bucket_arrived(self) -> None:
        """Note that the current backward is complete and may be finalized."""
        self._backward = backward_id()

    def after(self, backward: int) -> None:
        """Finalize the models of a backward."""
        if self._backward != backward:
            return
        self._backward = NO_BACKWARD
        for model in self._models():
            if model is not None and getattr(model, "require_manual_backward_finalization", False):
                finalize: Any = model.finalize_backward
                try:
                    finalize()
                except RuntimeError:  # a hook of this backward has finalized already
                    continue


_ALL: WeakSet[Finalizer] = WeakSet()


def raise_finalized(error: BaseException) -> None:
    """Raise ``error`` from ``backward()`` after DDP has finished and all models of this backward are finalized."""
    backward = backward_id()
    raise_after_backward(error, partial(_finalize, backward) if backward != NO_BACKWARD else None)


def _only(model: "ref[DistributedDataParallel]") -> list[DistributedDataParallel | None]:
    return [model()]


def _finalize(backward: int) -> None:
    for finalizer in list(_ALL):
        finalizer.after(backward)
