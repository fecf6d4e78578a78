"""Transfer a hook's shared state to a healing member.

Format 1: ``{"format": 1, "fingerprint": {field: text}, "step": int, "reference": float | None, "params": {name: {field:
tensor}}}``. The reference is that of weighted averages (:mod:`ch_core.engine.weights`). A snapshot has only
fields that are equal on all members, such as PowerSGD's Q. A residual belongs to one member. Copied, it would count
twice, so a healed member starts with none.
"""

import weakref
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from ch_core import Engine
from ch_ft.fingerprints import Fingerprint, compare
from ch_ft.manager import Manager
from commhooks import StateError

FORMAT = 1


def save(engine: Engine, fingerprint: Fingerprint) -> dict[str, Any]:
    """Return a snapshot of the committed state.

    The quorum's thread calls it during training, and torchft's transport serves CPU tensors without a copy. So the
    snapshot has clones.
    """
    engine.resolve_step()
    shared = engine.reduction.shared_fields
    params: dict[str, dict[str, torch.Tensor]] = {}
    for name, field, tensor in engine.state.entries():
        if field in shared:
            params.setdefault(name, {})[field] = tensor.detach().clone()
    return {
        "format": FORMAT,
        "fingerprint": dict(fingerprint),
        "step": engine.state.versions.certain.step,
        "reference": engine.state.versions.next_reference or engine.state.versions.reference,
        "params": params,
    }


def load(engine: Engine, fingerprint: Fingerprint, saved: dict[str, Any]) -> None:
    """Load a snapshot. State that this member wrote in the current step stays on top of it.

    With an asynchronous quorum the snapshot is from before the step, but arrives after the step's collectives. The
    vote then commits shared fields that the step wrote. That is right if they follow from reduced values, as
    PowerSGD's Q does. A field that depends on its own old value needs ``use_async_quorum=False``.

    Raises:
        RankMismatchError: another hook or model made the snapshot.
        StateError: it is not such a snapshot.
    """
    if not isinstance(saved, dict) or saved.get("format") != FORMAT:
        found = saved.get("format") if isinstance(saved, dict) else type(saved).__name__
        raise StateError(
            f"a peer sent a hook's state of format {found!r}; this version reads format {FORMAT}. Install the same version of "
            "ch-ft on all members"
        )
    compare(fingerprint, saved["fingerprint"])
    entries = {
        (name, field): tensor.detach().clone()
        for name, fields in saved["params"].items()
        for field, tensor in fields.items()
    }
    reference, keep = saved.get("reference"), engine.reduction.shared_fields
    engine.state.replace(entries, int(saved["step"]), keep=keep, reference=reference)


class Transferred:
    """Entry of one model or reducer in the state that its manager transfers. Registered once, for all later hooks."""

    def __init__(self, manager: Manager) -> None:
        self.manager = weakref.ref(manager)
        self.serve(None, {})
        count = _COUNTS.get(manager, 0)
        _COUNTS[manager] = count + 1
        manager.register_state_dict_fn(f"commhooks.{count}", self.load, self.save)

    def serve(self, engine: Engine | None, fingerprint: Fingerprint) -> None:
        """Send the state of this engine from now on. ``None`` sends nothing.

        The manager keeps this entry, so it must not keep the engine: a dropped model would never be freed.
        """
        self._engine: weakref.ref[Engine] | None = None if engine is None else weakref.ref(engine)
        self._fingerprint = fingerprint

    def save(self) -> dict[str, Any]:
        engine = self._served()
        return {} if engine is None else save(engine, self._fingerprint)

    def load(self, saved: dict[str, Any]) -> None:
        engine = self._served()
        if engine is not None:
            load(engine, self._fingerprint, saved)

    def _served(self) -> Engine | None:
        return self._engine() if self._engine is not None else None


_COUNTS = WeakIdKeyDictionary()  # manager -> number of its entries
_TRANSFERRED = WeakIdKeyDictionary()  # model or reducer -> Transferred


def transferred(owner: object, manager: Manager) -> Transferred:
    """Return the entry of a model or reducer in the state that its manager transfers."""
    found: Transferred | None = _TRANSFERRED.get(owner)
    if found is None or found.manager() is not manager:
        found = _TRANSFERRED[owner] = Transferred(manager)
    return found
