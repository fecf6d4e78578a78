"""Slot for the one hook of a DDP model.

torch registers one hook per model and never removes it. The trampoline is that hook. The slot decides which driver the
trampoline calls, so a handle can be detached and another one attached.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakIdKeyDictionary

from ch_ddp.adapter.driver import TensorFuture
from commhooks import AttachError, GradBucket, HookNotSupportedError, SlotTakenError


class SlotDriver(Protocol):
    """Callable that the trampoline calls with every bucket."""

    calls: int

    def __call__(self, bucket: GradBucket, /) -> TensorFuture: ...


class Slot:
    """Current driver of one model's trampoline.

    A copied model gets an empty slot, because the copy's reducer has no hook.

    Attributes:
        driver: called with every bucket.
        expr: expression of the attached handle, or None.
    """

    def __init__(self, driver: SlotDriver | None = None) -> None:
        self.driver = driver
        self.expr: str | None = None

    def __reduce__(self) -> tuple[object, ...]:
        return (Slot, ())


_SLOTS = WeakIdKeyDictionary()  # DDP model -> Slot


def trampoline(state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Pass a bucket to the slot's driver. torch registers this function, with the :class:`Slot` as its state."""
    if not isinstance(state, Slot) or state.driver is None:
        raise AttachError(
            "the commhooks trampoline was registered by hand. Only commhooks.attach(model, ...) may register it"
        )
    if not isinstance(bucket, GradBucket):
        raise HookNotSupportedError(
            f"DDP called the hook {state.expr or 'of a detached handle'} with {type(bucket).__name__} instead of a "
            "GradBucket. Hooks do not work under torch._dynamo.config.optimize_ddp='python_reducer'. Use torch.compile's "
            "default DDP mode"
        )
    return state.driver(bucket)


def acquire_slot(model: DistributedDataParallel, plain: Callable[[], SlotDriver]) -> Slot:
    """Return the model's slot. Register the trampoline first if the model has none.

    Args:
        model: DDP model.
        plain: makes the driver that averages until a hook is attached.

    Raises:
        SlotTakenError: another handle or a foreign hook occupies the slot.
    """
    if any(hasattr(p, "_in_backward_optimizers") for p in model._module_parameters):
        raise SlotTakenError(
            "an optimizer steps in the backward of this model (_apply_optimizer_in_backward). DDP takes the hook slot for it in "
            "the first forward. Wrap the model without it, attach, and make ch_ddp.OverlappedOptimizer(optimizer, handle)",
            by="_apply_optimizer_in_backward",
        )
    slot: Slot | None = _SLOTS.get(model)
    if slot is not None:
        if slot.expr is not None:
            raise SlotTakenError(
                f"this model already has the hook {slot.expr}. Call handle.detach() first, then attach again",
                by=slot.expr,
            )
        return slot
    copied = [state for state, hook in _registered(model) if isinstance(state, Slot) and state.driver is None]
    if copied and len(copied) == len(model._comm_hooks):
        model._comm_hooks.clear()  # entries of the original model; the copy's reducer has no hook
    if model._comm_hooks:
        names = ", ".join(getattr(hook, "__qualname__", repr(hook)) for hook, _ in model._comm_hooks)
        raise SlotTakenError(
            f"this model's only hook slot holds {names}, and torch cannot remove it. Wrap the model again, and call "
            "attach instead of register_comm_hook",
            by=names,
        )
    slot = Slot(plain())
    try:
        model.register_comm_hook(slot, trampoline)
    except RuntimeError as error:
        raise SlotTakenError(
            f"torch refused a hook on this model ({error}). DDP mixed precision, an overlapped optimizer or a built-in "
            "hook uses its slot. Wrap the model again without it"
        ) from error
    _SLOTS[model] = slot
    return slot


def refuse_registered(model: DistributedDataParallel, instead: str) -> None:
    """Refuse a model that has a hook, because ``instead`` needs the local gradients.

    Raises:
        SlotTakenError: names the hook and ``instead``.
    """
    slot: Slot | None = _SLOTS.get(model)
    names = [getattr(hook, "__qualname__", repr(hook)) for hook, _ in model._comm_hooks if slot is None]
    if slot is not None and slot.expr is not None:
        names = [slot.expr]
    if names:
        raise SlotTakenError(
            f"this model has the hook {', '.join(names)}, which averages gradients. For {instead}, wrap the model without it"
        )


def _registered(model: DistributedDataParallel) -> list[tuple[object, object]]:
    """Return ``(state, hook)`` of every hook that DDP's Python side has recorded."""
    return [(state, hook) for hook, state in model._comm_hooks]
