"""Checkpoints of hooks: tensors and plain values, keyed by parameter name, one per rank.

Format 1: ``{"format": 1, "expr": str, "world_size": int, "rank": int, "step": int, "params": {name: {field:
tensor}}}``.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from commhooks.errors import StateError
from commhooks.state import HookState

if TYPE_CHECKING:
    from commhooks.handle import CommHook

FORMAT = 1


def state_dict(handle: "CommHook") -> dict[str, Any]:
    """See :meth:`commhooks.CommHook.state_dict`."""
    state = _state_of(handle)
    engine = handle.binding.engine if handle.binding is not None else None
    if engine is not None:
        engine.settle()
    params: dict[str, dict[str, torch.Tensor]] = {}
    for name, field, tensor in state.entries():
        params.setdefault(name, {})[field] = tensor.detach().clone()
    return {
        "format": FORMAT,
        "expr": handle.expr,
        "world_size": engine.transport.world_size if engine is not None else 1,
        "rank": engine.transport.rank if engine is not None else 0,
        "step": state.step,
        "params": params,
    }


def load_state_dict(handle: "CommHook", saved: Mapping[str, Any]) -> None:
    """See :meth:`commhooks.CommHook.load_state_dict`."""
    state = _state_of(handle)
    missing = {"format", "expr", "world_size", "rank", "step", "params"} - set(saved)
    if missing:
        raise StateError(f"this is not the state of a hook: {sorted(missing)} are missing")
    if saved["format"] != FORMAT:
        raise StateError(f"state format {saved['format']!r}; this version reads {FORMAT}")
    if saved["expr"] != handle.expr:
        raise StateError(f"the state was saved by {saved['expr']}, this hook is {handle.expr}")
    entries: dict[tuple[str, str], torch.Tensor] = {}
    for name, fields in saved["params"].items():
        for field, tensor in fields.items():
            entries[name, field] = tensor.detach().clone()
    state.replace(entries, int(saved["step"]))


def _state_of(handle: "CommHook") -> HookState:
    if not isinstance(handle.state, HookState):
        raise StateError(f"{handle.expr} keeps its state itself ({type(handle.state).__name__}); save it by its own means")
    return handle.state
