"""The ways to attach a hook to a DDP model."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commhooks
from commhooks import CommHook, load_state_dict, state_dict
from tests.campaign.draw import Case
from tests.campaign.plants import make


class Attached:
    """An attached hook, through ``attach`` with a handle or ``register_comm_hook`` with a state."""

    def __init__(self, handle: CommHook | None, state: Any) -> None:
        self.handle, self.state = handle, state

    @property
    def keeper(self) -> Any:
        """Return the object to save and load, or None for a foreign or stateless function."""
        if self.handle is not None:
            return self.handle if self.handle.reduction is not None else None
        return self.state

    def save(self) -> dict[str, Any]:
        return state_dict(self.keeper) if self.keeper is not None else {}

    def load(self, saved: Mapping[str, Any]) -> None:
        if self.keeper is not None:
            load_state_dict(self.keeper, saved)

    def residuals(self, params: Mapping[str, nn.Parameter]) -> dict[str, torch.Tensor]:
        """Return residuals by the model's own names. A hook function names parameters by position."""
        if self.keeper is None:
            return {}
        entries = self.save()["entries"]
        unit = self.save().get("reference", 1.0)
        found = {name: row["residual"] * unit for name, row in entries.items() if "residual" in row}
        if self.handle is not None:
            return found
        names = list(params)
        return {names[int(name.split(":")[0])]: residual for name, residual in found.items()}

    def close(self) -> dict[str, float]:
        """Check that the hook was called and is active, then remove it."""
        if self.handle is None:
            return {}
        self.handle.check()
        self.handle.assert_active()
        stats = self.handle.stats()
        self.handle.plan()
        self.handle.detach()
        return {key: stats[key] for key in ("steps", "compressed_steps") if key in stats}


def open_door(case: Case, model: DistributedDataParallel, optimizer: Any, scaler: Any) -> Attached:
    """Attach the case's hook."""
    if case.door == "attach":
        told = {"optimizer": optimizer if case.given in {"optimizer", "both"} else None, "scaler": scaler}
        told["weighted"] = bool(case.weighted)
        return Attached(commhooks.attach(model, make(case.expr), timeout=20.0, **told), None)
    name, _, options = case.hook.partition("(")
    state = None
    if options:
        from ch_powersgd import PowerSGDState

        state = PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
    model.register_comm_hook(state, commhooks.get(name))
    return Attached(None, state)
