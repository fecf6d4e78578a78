"""The place where FSDP2 ends a backward."""

import functools
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from ch_fsdp.torch_internals.required import missing, need
from commhooks import NO_BACKWARD, HookResultError, backward_id

try:
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState, FSDPStateContext
except ImportError as error:
    raise missing("torch.distributed.fsdp", str(error)) from error

need(FSDPState, "_root_post_backward_final_callback")
need(FSDPStateContext(), "all_states", "post_backward_final_callback_queued")


class BackwardEnd:
    """Calls the adapter when FSDP2 ends a backward, and when an interrupted backward is to be forgotten.

    A backward of FSDP2 may contain several passes of autograd (reentrant checkpointing, a loss in chunks). A pipeline
    reduces after its last pass. From torch 2.15 on the user may decide the end. In all these cases torch calls the same
    function at the end, and this class wraps it.

    Args:
        model: the model to watch.
        ended: called after torch ended a backward.
        forget: called before the next forward if a backward was interrupted, and with ``reset=True`` after
            ``reset_iter_state()``.
        replicas: True if the handle reduces between replicas.
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
        self._watch_states()
        self._forward = model.register_forward_pre_hook(self._before_forward)

    def close(self) -> None:
        for state in self._states.values():
            _listeners(state).remove(self)
        self._states.clear()
        self._forward.remove()

    @property
    def shared(self) -> bool:
        """True if another handle reduces between replicas in the same backwards. Ranks agree on no order between them."""
        others = (other for state in self._states.values() for other in _listeners(state) if other is not self)
        return any(other._replicas for other in others)

    @property
    def manual(self) -> bool:
        """True if the user ends the present backward (``finalize_backward``)."""
        return any(_is_manual(state) for state in self._states.values())

    def _before_forward(self, module: torch.nn.Module, args: Any) -> None:
        if backward_id() != NO_BACKWARD or not torch.is_grad_enabled():
            return  # a recomputation inside of a backward, or a forward without a backward
        self._watch_states()
        if any(state._state_ctx.post_backward_final_callback_queued for state in self._states.values()):
            raise HookResultError(
                "an exception ended an earlier backward of this model before FSDP2 could, so FSDP2 will end no later one. "
                "Call reset_iter_state() on the outermost module, or build the model again if torch lacks that method"
            )
        if not self.manual:  # a manual end may come after several forwards
            self.forget()

    def _watch_states(self) -> None:
        """Watch all modules that share the outermost module, which FSDP2 knows from the first forward on."""
        for module in self._model.modules():
            if isinstance(module, FSDPModule):
                state = module._get_fsdp_state()
                every = (state, *state._state_ctx.all_states)
                if any(id(one) not in self._states for one in every):
                    # The backward of another handle may end here too, even if it does not use these modules.
                    for other in {listener for one in every for listener in _listeners(one)} | {self}:
                        other._add_states(every)

    def _add_states(self, states: Iterable[Any]) -> None:
        for state in states:
            if id(state) not in self._states:
                self._states[id(state)] = state
                listeners = _listeners(state)
                listeners.append(self)
                listeners.sort(
                    key=lambda listener: listener.number
                )  # handles end their steps in one order on all ranks


def _is_manual(state: Any) -> bool:
    return bool(getattr(state._state_ctx, "manual_backward_finalization_active", None))


def _listeners(state: Any) -> list[BackwardEnd]:
    """Return the listeners of one module's state. The first call wraps torch's functions."""
    found: list[BackwardEnd] | None = state.__dict__.get("_commhooks_listeners")
    if found is not None:
        return found
    listeners: list[BackwardEnd] = []
    state._commhooks_listeners = listeners

    def wrap(name: str, *, forget: bool = False) -> None:
        original = getattr(state, name, None)
        if original is None:  # torch before 2.15 has no finalize_backward, before 2.13 no _reset_iter_state
            return

        @functools.wraps(original)
        def then(*args: Any, **options: Any) -> None:
            original(*args, **options)
            early = name == "_root_post_backward_final_callback" and _is_manual(state)
            if not early and state._is_root is not None:
                for listener in list(listeners):
                    listener.forget(reset=True) if forget else listener.ended()

        setattr(state, name, then)

    wrap("_root_post_backward_final_callback")
    wrap("finalize_backward")
    wrap("_reset_iter_state", forget=True)
    return listeners
