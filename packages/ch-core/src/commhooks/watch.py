"""Watchers of a training step: whether its gradients were used, and whether they were synchronised at all."""

import weakref
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from commhooks.after import raise_after_backward
from commhooks.errors import AttachError, HookConfigError, HookNotSupportedError


class OptimizerWatch:
    """Whether the optimizer used a step: the engine's ``outside`` verdict.

    A ``GradScaler`` that found Inf does not call ``optimizer.step()``, unless the optimizer is fused: that one is
    called and told by its ``found_inf``. A synchronised backward that no ``step()`` follows counts as skipped, so
    accumulate under ``no_sync()``.

    Args:
        optimizer: the one that uses the model's gradients.
        scaler: a ``GradScaler``. Alone, without its optimizer, a step counts as skipped when the scale went down.

    Raises:
        HookConfigError: what was given is no optimizer, or no scaler.
    """

    def __init__(self, optimizer: torch.optim.Optimizer | None, scaler: Any) -> None:
        if optimizer is not None and not hasattr(optimizer, "register_step_post_hook"):
            raise HookConfigError(f"optimizer={type(optimizer).__name__}: expected a torch.optim.Optimizer")
        if scaler is not None and not hasattr(scaler, "get_scale"):
            raise HookConfigError(f"scaler={type(scaler).__name__}: expected a torch.amp.GradScaler")
        self.scaler = scaler
        self.steps = 0
        self._marked, self._scale = 0, self.scale()
        self._found: torch.Tensor | None = None
        self._removable = None if optimizer is None else optimizer.register_step_post_hook(self._stepped)

    def scale(self) -> float:
        """The loss scale of the step that begins."""
        return float(self.scaler.get_scale()) if self.scaler is not None and self.scaler.is_enabled() else 1.0

    def mark(self) -> None:
        self._marked, self._found = self.steps, None
        if self._removable is None:
            self._scale = self.scale()

    def used(self) -> bool:
        if self._removable is None:
            good = self.scale() >= self._scale
            self.steps += good
            return good
        return self.steps > self._marked and (self._found is None or not bool(self._found.item()))

    def decided(self) -> bool:
        """Whether :meth:`used` would answer the same later. With a scaler alone nothing says that it has been updated."""
        return self._removable is None or self.steps > self._marked

    def clock(self) -> int:
        return self.steps

    def close(self) -> None:
        """Leave the optimizer alone."""
        if self._removable is not None:
            self._removable.remove()

    def _stepped(self, optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        self.steps += 1
        found = getattr(optimizer, "found_inf", None)  # there only while a GradScaler runs a fused step
        self._found = found.detach().clone() if isinstance(found, torch.Tensor) else None


class SyncWatch:
    """Notices gradients that DDP does not synchronise: torch says nothing, and the ranks drift apart.

    It happens when ``backward()`` runs a second time on a retained graph, for the first of two forwards, or after
    calling ``model.module`` directly. One parameter, the last, is watched: its gradient must be preceded by a forward
    of the DDP model.

    Args:
        model: the DDP model.
        name: of the hook, for the error.
    """

    def __init__(self, model: DistributedDataParallel, name: str) -> None:
        self._model = weakref.ref(model)
        self._name = name
        self._armed = False
        trainable = [p for p in model.module.parameters() if p.requires_grad]
        self._removable: list[Any] = [model.register_forward_pre_hook(self._forward)]
        if trainable:
            self._removable.append(trainable[-1].register_post_accumulate_grad_hook(self._arrived))

    def synchronised(self) -> None:
        """The last bucket of a backward has come."""
        self._armed = False

    def close(self) -> None:
        """Stop watching."""
        for hook in self._removable:
            hook.remove()
        self._removable.clear()

    def __reduce__(self) -> tuple[Any, ...]:
        return (_nothing, ())  # a copy of the model is not the model that is watched

    def _forward(self, model: torch.nn.Module, inputs: object) -> None:
        # A forward without gradients (a teacher, an evaluation) takes nothing back from the one before it.
        if torch.is_grad_enabled() and model.require_backward_grad_sync:
            self._armed = True

    def _arrived(self, param: torch.Tensor) -> None:
        if torch.is_grad_enabled():  # in a backward: create_graph=True; the reducer would fail half way through
            raise HookNotSupportedError(
                "DDP cannot average gradients under backward(create_graph=True). Use torch.autograd.grad(..., "
                "create_graph=True) for the inner derivative, and an ordinary backward() of the final loss"
            )
        model = self._model() if not self._armed else None
        if model is None or not model.require_backward_grad_sync:
            return
        raise_after_backward(
            AttachError(
                f"{self._name} was not called for this backward: DDP synchronises one backward per forward of the "
                "wrapped model, and the gradients of this one differ from rank to rank. Add the losses up and call "
                "backward() once, or run it inside model.no_sync() if local gradients are meant"
            )
        )


def _nothing() -> SyncWatch:
    """What a copied model holds in the place of its original's watch."""
    watch = SyncWatch.__new__(SyncWatch)
    watch._armed, watch._removable = True, []
    return watch
