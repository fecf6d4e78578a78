"""Finds the optimizers that hold parameters of a model.

The user may thaw parameters after ``attach``, or add them to the model. If an optimizer holds no known parameter, the model's
parameters are therefore read again.
"""

import weakref
from collections.abc import Callable, Iterable

import torch

Params = Callable[[], Iterable[torch.Tensor]]
"""Returns the present parameters of a model, trainable and frozen, such as ``model.parameters``."""


class ModelOptimizers:
    """Knows which optimizers hold parameters of a model.

    Args:
        given: the optimizer given to ``attach``. It counts even if it holds other parameters, such as fp32 copies.
        params: returns the parameters of the model.
    """

    def __init__(self, given: torch.optim.Optimizer | None, params: Params) -> None:
        self._params = params
        self._given = weakref.ref(given) if given is not None else lambda: None
        self._seen: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet([given] if given is not None else [])
        self._ours: dict[int, torch.Tensor] = {}  # id -> parameter; while it is kept, no other tensor gets its id
        self._stale = True  # True if the model may have more parameters now
        self._held: tuple[int, list[torch.Tensor]] = (0, [])

    @property
    def known(self) -> list[torch.optim.Optimizer]:
        """The optimizers that count so far."""
        return list(self._seen)

    def knows(self, optimizer: torch.optim.Optimizer) -> bool:
        """True if :meth:`add` has remembered this optimizer."""
        return optimizer in self._seen

    def add(self, optimizer: torch.optim.Optimizer) -> None:
        """Remember an optimizer that counts."""
        if optimizer not in self._seen:
            self._seen.add(optimizer)
            self._held = (0, [])  # it may take the place of one of equal size that is gone

    def counts(self, optimizer: torch.optim.Optimizer) -> bool:
        """True if a step of this optimizer may use the model's gradients."""
        return optimizer is self._given() or self.holds_ours(optimizer)

    def holds_ours(self, optimizer: torch.optim.Optimizer) -> bool:
        """True if the optimizer holds parameters of the model that are trainable or have a gradient.

        The step of an optimizer of frozen parameters uses nothing.
        """
        if self._holds_known(optimizer):
            return True
        if not self._stale:
            return False
        self._read()
        return self._holds_known(optimizer)

    def held_params(self) -> list[torch.Tensor]:
        """Return the parameters that a known optimizer holds; all if there is none. Training loops never zero others.

        Call it at the end of each step. Until the next call, the model is read once at most.
        """
        self._stale = True
        size = sum(map(_size, self._seen))
        if size == 0 or size != self._held[0]:
            held = {id(p) for optimizer in self._seen for group in optimizer.param_groups for p in group["params"]}
            every = self._read()
            self._held = size, [p for p in every if id(p) in held] or every
        return self._held[1]

    def _holds_known(self, optimizer: torch.optim.Optimizer) -> bool:
        held = (p for group in optimizer.param_groups for p in group["params"])
        return any(id(p) in self._ours and (p.requires_grad or p.grad is not None) for p in held)

    def _read(self) -> list[torch.Tensor]:
        self._ours, self._stale = {id(p): p for p in self._params()}, False
        return list(self._ours.values())


def _size(optimizer: torch.optim.Optimizer) -> int:
    """Return the number of parameters that an optimizer holds. It only grows."""
    return sum(len(group["params"]) for group in optimizer.param_groups)
