"""What the adapters of all trainers have in common: when a hook is attached, and how its state is saved and resumed."""

import logging
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from os import PathLike
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import commhooks
from commhooks import CommHook, Reduction, StateError
from commhooks.checkpoint import dcp, gather, load_gathered

log = logging.getLogger("commhooks")

What = str | Mapping[str, Any] | Callable[..., Any] | Reduction | CommHook
"""What :func:`commhooks.attach` takes as a hook."""


class TrainerHook:
    """A hook that a trainer's adapter attaches to what the trainer has wrapped.

    A process that trains alone has nobody to reduce with: there nothing is attached, which is logged once, and saving
    and loading do nothing.

    Args:
        what: as for :func:`commhooks.attach`.
        options: further arguments of :func:`commhooks.attach`; ``single_process=True`` attaches in one process too.

    Attributes:
        handle: the attached hook; ``None`` before, and in one process.
    """

    def __init__(self, what: What, options: Mapping[str, Any]) -> None:
        self.what = what
        self.options = dict(options)
        self.even_alone = bool(self.options.get("single_process", False))
        self.handle: CommHook | None = None
        self._told = False

    def attach(self, model: torch.nn.Module, scaler: object | None = None) -> None:
        """Attach to a model, or go on with the same state on another one (a trainer wraps anew for every fit).

        Args:
            model: the wrapped model.
            scaler: the trainer's ``GradScaler``, if it has one: residuals are kept unscaled.
        """
        # Not left to attach(): a process that trains alone has no wrapped model that it could attach to.
        if not self.even_alone and not (dist.is_initialized() and dist.get_world_size() > 1):
            if not self._told:
                log.warning("%s is not attached: this process trains alone, and has nobody to reduce with", self.what)
            self._told = True
            return
        if self.handle is not None and self.handle.attached:
            self.handle.detach()
        given = {"scaler": scaler, **self.options} if scaler is not None else self.options
        self.handle = commhooks.attach(model, self.what if self.handle is None else self.handle, **given)

    @property
    def keeps_state(self) -> bool:
        """Whether there is anything to save: not before it is attached, and not for a function without a state."""
        return self.handle is not None and self.handle.state is not None

    # -- checkpoints that are a folder

    def save(self, folder: str | PathLike[str]) -> None:
        """Write every rank's state below a folder; all ranks make this call.

        Raises:
            StateError: a foreign hook that keeps its state itself.
        """
        if self.handle is not None and self.keeps_state:
            dcp.save(self.handle, Path(folder))

    def load(self, folder: str | PathLike[str]) -> None:
        """Go on from what :meth:`save` wrote, with the same number of ranks or another; all ranks make this call.

        Where there is nothing (a checkpoint from before the hook was used), the hook starts afresh, with a warning.

        Raises:
            StateError: what is there does not fit, or only some ranks see it.
        """
        if self.handle is None or not self.keeps_state:
            return self._left_behind(folder) if Path(folder, ".metadata").exists() else None
        there: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(there, Path(folder, ".metadata").exists())
        if not any(there):
            return self.starts_afresh(folder)
        if not all(there):
            blind = [rank for rank, sees in enumerate(there) if not sees]
            raise StateError(
                f"ranks {blind} do not see {folder}, other ranks do: put checkpoints where every rank can read"
            )
        return dcp.load(self.handle, Path(folder), world_change="mean")

    # -- checkpoints that are one file, written by rank 0

    def gather(self) -> dict[str, Any]:
        """Every rank's state on rank 0, nothing elsewhere; all ranks make this call.

        Raises:
            StateError: a foreign hook that keeps its state itself.
        """
        return gather(self.handle) if self.handle is not None and self.keeps_state else {}

    def load_gathered(self, saved: Mapping[str, Any]) -> None:
        """Go on from what :meth:`gather` gave on rank 0; all ranks make this call.

        Raises:
            StateError: it does not fit.
        """
        if self.handle is None or not self.keeps_state:
            return self._left_behind("the checkpoint")
        return load_gathered(self.handle, saved, world_change="mean")

    def starts_afresh(self, checkpoint: object) -> None:
        """Say that a run goes on from a checkpoint that has nothing of the hook."""
        if self.keeps_state:
            log.warning("%s has no state of %s: its step and residuals start afresh", checkpoint, self.what)

    def _left_behind(self, checkpoint: object) -> None:
        log.warning(
            "the hook's state in %s is not loaded: %s is not attached here, or keeps none", checkpoint, self.what
        )


def bases(name: str, *modules: str) -> tuple[type, ...]:
    """The class of this name in each of the modules whose package is in use; if none is, in the first that is installed.

    Lightning comes as two packages with classes of their own, and a trainer takes those of its own package only.

    Returns:
        The classes; empty if no package is installed.

    Example:
        >>> bases("OrderedDict", "not_installed.there", "collections"), bases("OrderedDict", "not_installed")
        ((<class 'collections.OrderedDict'>,), ())
    """
    used = [module for module in modules if module in sys.modules]
    found: list[type] = []
    for module in used or modules:
        try:
            found.append(getattr(import_module(module), name))
        except ImportError:
            continue
        if not used:
            break
    return tuple(found)
