"""Where FSDP2 ends a backward: what this package reads or sets for it that torch keeps private."""

import functools
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from ch_fsdp.torch_internals import missing, need
from commhooks import HookResultError
from commhooks.adapters import NO_BACKWARD, backward_id

try:
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState, FSDPStateContext
except ImportError as error:
    raise missing("torch.distributed.fsdp", str(error)) from error

need(FSDPState, "_root_post_backward_final_callback")
need(FSDPStateContext(), "all_states", "post_backward_final_callback_queued")


class BackwardEnds:
    """Hears when FSDP2 itself ends a backward, and when it is told to forget one that was cut short.

    A backward of FSDP2 is more than a pass of autograd: nested passes (reentrant checkpointing) and passes over parts
    (a loss in chunks) belong to one, a pipeline reduces after its last pass, and from torch 2.15 on the user may say
    where it ends. torch calls one function there in all of these cases.

    Args:
        model: below which to listen.
        ended: called after torch has ended a backward.
        forget: called when one that has begun will never end: before the next forward of ``model``, or, with
            ``reset=True``, after ``reset_iter_state()``.
        replicas: whether something is reduced between replicas.
    """

    _numbers = itertools.count()

    def __init__(
        self,
        model: torch.nn.Module,
        ended: Callable[[], None],
        forget: Callable[..., None],
        *,
        replicas: bool = False,
    ) -> None:
        self._model, self.ended, self.forget, self._replicas = model, ended, forget, replicas
        self.number = next(self._numbers)
        self._states: dict[int, Any] = {}
        self.follow()
        self._forward = model.register_forward_pre_hook(self._before_forward)

    def _before_forward(self, module: torch.nn.Module, args: Any) -> None:
        if backward_id() != NO_BACKWARD or not torch.is_grad_enabled():
            return  # recomputed in a backward, or followed by none
        self.follow()
        if any(state._state_ctx.post_backward_final_callback_queued for state in self._states.values()):
            raise HookResultError(
                "an exception ended an earlier backward of this model before FSDP2 could, and it never ends one again: "
                "call reset_iter_state() on the outermost module before you go on (or build the model anew, where "
                "torch lacks it)"
            )
        if not self.by_hand:  # then backwards and forwards take turns before the end
            self.forget()

    def follow(self) -> None:
        """Listen above the model too: from the first forward on FSDP2 knows which module is outermost."""
        for module in self._model.modules():
            if isinstance(module, FSDPModule):
                state = module._get_fsdp_state()
                every = (state, *state._state_ctx.all_states)
                if any(id(one) not in self._states for one in every):
                    # Others below the same outermost module hear of its end too, though theirs may not be used here.
                    for other in {listener for one in every for listener in _listeners(one)} | {self}:
                        other._listen(every)

    def _listen(self, states: Iterable[Any]) -> None:
        for state in states:
            if id(state) not in self._states:
                self._states[id(state)] = state
                listeners = _listeners(state)
                listeners.append(self)
                listeners.sort(key=lambda listener: listener.number)  # steps end in one order on all ranks

    def close(self) -> None:
        for state in self._states.values():
            _listeners(state).remove(self)
        self._states.clear()
        self._forward.remove()

    @property
    def shared(self) -> bool:
        """Whether another handle reduces between replicas in the same backwards: which comes first, nobody agreed."""
        others = (other for state in self._states.values() for other in _listeners(state) if other is not self)
        return any(other._replicas for other in others)

    @property
    def by_hand(self) -> bool:
        """Whether the present backward ends where the user says so (``finalize_backward``)."""
        return any(_by_hand(state) for state in self._states.values())


def _by_hand(state: Any) -> bool:
    return bool(getattr(state._state_ctx, "manual_backward_finalization_active", None))


def _listeners(state: Any) -> list[BackwardEnds]:
    """Who listens to one module's state; the first makes torch's functions tell."""
    found: list[BackwardEnds] | None = state.__dict__.get("_commhooks_listeners")
    if found is not None:
        return found
    listeners: list[BackwardEnds] = []
    state._commhooks_listeners = listeners

    def tell(name: str, *, forget: bool = False) -> None:
        original = getattr(state, name, None)
        if original is None:  # neither finalize_backward before torch 2.15 nor _reset_iter_state before 2.13
            return

        @functools.wraps(original)
        def then(*args: Any, **options: Any) -> None:
            original(*args, **options)
            early = name == "_root_post_backward_final_callback" and _by_hand(state)
            if not early and state._is_root is not None:
                for listener in list(listeners):
                    listener.forget(reset=True) if forget else listener.ended()

        setattr(state, name, then)

    tell("_root_post_backward_final_callback")
    tell("finalize_backward")
    tell("_reset_iter_state", forget=True)
    return listeners
