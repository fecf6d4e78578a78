"""The one hook slot of a DDP model: torch lets a model have one hook for ever. The trampoline is that hook; what it
calls can be changed, so a handle can be detached and another attached.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakIdKeyDictionary

from ch_ddp.adapter.driver import TensorFuture
from ch_ddp.adapter.futures import behind_backward
from ch_ddp.adapter.unsynced_backward import UnsyncedBackwardWatch
from commhooks import AttachError, GradBucket, HookNotSupportedError, SlotTakenError


class SlotDriver(Protocol):
    """What a trampoline calls for every bucket."""

    calls: int

    def __call__(self, bucket: GradBucket, /) -> TensorFuture: ...

    def check(self) -> None: ...


class Slot:
    """What the trampoline of one model calls at present; empty in a copy of the model, whose reducer has no hook."""

    def __init__(self, driver: SlotDriver | None = None) -> None:
        self.driver = driver
        self.holder: str | None = None  # expression of the attached handle
        self.watch: UnsyncedBackwardWatch | None = None
        self.follow: Callable[[], None] | None = None  # takes notice of a changed process group

    def __reduce__(self) -> tuple[Any, ...]:
        return (Slot, ())


_SLOTS = WeakIdKeyDictionary()  # DDP model -> Slot


def trampoline(state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The only hook ever registered on a model; ``state`` is its :class:`Slot`."""
    if not isinstance(state, Slot) or state.driver is None:
        raise AttachError("the commhooks trampoline was registered by hand; use commhooks.attach(model, ...)")
    if not isinstance(bucket, GradBucket):
        raise HookNotSupportedError(
            f"DDP called the hook {state.holder or 'of a detached handle'} with {type(bucket).__name__} instead of a "
            "GradBucket: hooks do not work under torch._dynamo.config.optimize_ddp='python_reducer'. Use torch.compile's "
            "default DDP mode"
        )
    if state.follow is not None and bucket.index() == 0:
        state.follow()
    if state.watch is not None and (bucket.is_last() or behind_backward()):
        state.watch.synchronised()
    return state.driver(bucket)


def acquire_slot(model: DistributedDataParallel, plain: Callable[[], SlotDriver]) -> Slot:
    """The model's slot, with the trampoline registered; ``plain`` makes what it calls until a hook is attached.

    Raises:
        SlotTakenError: another handle or a foreign hook is there.
    """
    slot: Slot | None = _SLOTS.get(model)
    if slot is not None:
        if slot.holder is not None:
            raise SlotTakenError(
                f"this model has {slot.holder} attached already: handle.detach() first, then attach again"
            )
        return slot
    copied = [state for state, hook in _registered(model) if isinstance(state, Slot) and state.driver is None]
    if copied and len(copied) == len(model._comm_hooks):
        model._comm_hooks.clear()  # of the model that this one is a copy of; its own reducer has none
    if model._comm_hooks:
        names = ", ".join(getattr(hook, "__qualname__", repr(hook)) for hook, _ in model._comm_hooks)
        raise SlotTakenError(
            f"this model's only hook slot is taken by {names}, and torch cannot remove it. Wrap the model anew and "
            "attach instead of calling register_comm_hook"
        )
    slot = Slot(plain())
    try:
        model.register_comm_hook(slot, trampoline)
    except RuntimeError as error:
        raise SlotTakenError(
            f"torch refused a hook on this model ({error}); its slot is used by DDP mixed precision, an overlapped "
            "optimizer or a built-in hook"
        ) from error
    _SLOTS[model] = slot
    return slot


def _registered(model: DistributedDataParallel) -> list[tuple[object, object]]:
    """``(state, hook)`` of everything the Python side of DDP believes to be registered."""
    return [(state, hook) for hook, state in model._comm_hooks]
