"""What a healing member receives of a hook: the shared state, and the fingerprint of what made it.

Format 1: ``{"format": 1, "fingerprint": {field: text}, "step": int, "params": {name: {field: tensor}}}``. Only fields
that are the same on all members travel (PowerSGD's Q). A residual is private: copied, it would be counted twice, so
the healed member begins with none.
"""

import weakref
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from ch_ft.agreement import Fingerprint, compare
from ch_ft.managed_engine import ManagedEngine
from ch_ft.protocols import Manager
from commhooks import StateError

FORMAT = 1


def save(engine: ManagedEngine, fingerprint: Fingerprint) -> dict[str, Any]:
    """A snapshot of the committed state. Runs on the quorum's thread while training goes on, hence the clones:
    torchft's transport serves CPU tensors as they are, not copies.
    """
    engine.resolve_step()
    shared = engine.reduction.shared_fields
    params: dict[str, dict[str, torch.Tensor]] = {}
    for name, field, tensor in engine.state.entries():
        if field in shared:
            params.setdefault(name, {})[field] = tensor.detach().clone()
    return {"format": FORMAT, "fingerprint": dict(fingerprint), "step": engine.state.certain_step, "params": params}


def load(engine: ManagedEngine, fingerprint: Fingerprint, saved: dict[str, Any]) -> None:
    """Take over a snapshot, under what this member may have staged in the step that it heals in.

    With an async quorum the snapshot, from before the step, comes after the step's collectives. What the step staged of
    shared fields is committed on top, which is right if it follows from what was reduced, as PowerSGD's Q does. A field
    that is made of its own old value needs ``use_async_quorum=False``.

    Raises:
        RankMismatchError: it was made by another hook or for another model.
        StateError: it is no such snapshot.
    """
    if not isinstance(saved, dict) or saved.get("format") != FORMAT:
        found = saved.get("format") if isinstance(saved, dict) else type(saved).__name__
        raise StateError(f"the state of the hook that was sent has format {found!r}; this version reads {FORMAT}")
    compare(fingerprint, saved["fingerprint"])
    entries = {
        (name, field): tensor.detach().clone()
        for name, fields in saved["params"].items()
        for field, tensor in fields.items()
    }
    engine.state.replace(entries, int(saved["step"]), keep=engine.reduction.shared_fields)


class Transferred:
    """What the manager sends to a healing member for one owner of a hook's state: registered once, whatever is attached later."""

    def __init__(self, manager: Manager) -> None:
        self.manager = weakref.ref(manager)
        self.serve(None, {})
        count = _COUNTS.get(manager, 0)
        _COUNTS[manager] = count + 1
        manager.register_state_dict_fn(f"commhooks.{count}", self.load, self.save)

    def serve(self, engine: ManagedEngine | None, fingerprint: Fingerprint) -> None:
        """Send the state of this engine from now on, or nothing."""
        self._served = engine, fingerprint

    def save(self) -> dict[str, Any]:
        engine, fingerprint = self._served
        return {} if engine is None else save(engine, fingerprint)

    def load(self, saved: dict[str, Any]) -> None:
        engine, fingerprint = self._served
        if engine is not None:
            load(engine, fingerprint, saved)


_COUNTS = WeakIdKeyDictionary()  # manager -> owners of a hook's state
_TRANSFERRED = WeakIdKeyDictionary()  # owner -> Transferred


def transferred(owner: object, manager: Manager) -> Transferred:
    """The entry of a model, or of a reducer, in what its manager transfers."""
    found: Transferred | None = _TRANSFERRED.get(owner)
    if found is None or found.manager() is not manager:
        found = _TRANSFERRED[owner] = Transferred(manager)
    return found
