"""Common part of all trainers' adapters: attaches a hook, and saves and resumes its state."""

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
from commhooks import CommHook, Reduction, StateError, gather, load_gathered

log = logging.getLogger("commhooks")

What = str | Mapping[str, Any] | Callable[..., Any] | Reduction | CommHook
"""A hook, in any form that :func:`commhooks.attach` takes."""


class TrainerHook:
    """A hook that a trainer's adapter attaches to the wrapped model.

    A process that trains alone has no peers. It attaches nothing and logs this once, and saving and loading do nothing.

    Args:
        what: hook, as for :func:`commhooks.attach`.
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
        """Attach to a model. Later calls continue the same state on another model, because a trainer wraps again for every fit.

        Args:
            model: the wrapped model.
            scaler: the trainer's ``GradScaler``, if it has one. Residuals follow its scale.
        """
        # attach() cannot decide this, because a process that trains alone has no wrapped model.
        if not self.even_alone and not (dist.is_initialized() and dist.get_world_size() > 1):
            if not self._told:
                log.warning("%s is not attached: this process trains alone, without peers", self.what)
            self._told = True
            return
        if self.handle is not None and self.handle.attached:
            self.handle.detach()
        given = {"scaler": scaler, **self.options} if scaler is not None else self.options
        self.handle = commhooks.attach(model, self.what if self.handle is None else self.handle, **given)

    @property
    def keeps_state(self) -> bool:
        """True if there is a state to save. False before attach, and for a function without a state."""
        return self.handle is not None and self.handle.state is not None

    # -- checkpoints that are a folder

    def save(self, folder: str | PathLike[str]) -> None:
        """Write every rank's state to a folder. This call is collective.

        Raises:
            StateError: a foreign hook has its own state.
        """
        if self.handle is not None and self.keeps_state:
            commhooks.dcp.save(self.handle, Path(folder))

    def load(self, folder: str | PathLike[str]) -> None:
        """Load the result of :meth:`save`, on any number of ranks. This call is collective.

        If there is none (a checkpoint without the hook), the hook starts without state and warns.

        Raises:
            StateError: the state does not fit, or only some ranks see it.
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
        return commhooks.dcp.load(self.handle, Path(folder), world_change="mean")

    # -- checkpoints that are one file, written by rank 0

    def gather(self) -> dict[str, Any]:
        """Return every rank's state on rank 0, and an empty dict elsewhere. This call is collective.

        Raises:
            StateError: a foreign hook has its own state.
        """
        return gather(self.handle) if self.handle is not None and self.keeps_state else {}

    def load_gathered(self, saved: Mapping[str, Any]) -> None:
        """Load the result of :meth:`gather` on rank 0. This call is collective.

        Raises:
            StateError: the state does not fit.
        """
        if self.handle is None or not self.keeps_state:
            return self._left_behind("the checkpoint")
        return load_gathered(self.handle, saved, world_change="mean")

    def starts_afresh(self, checkpoint: object) -> None:
        """Warn that the checkpoint has no state of the hook."""
        if self.keeps_state:
            log.warning("%s has no state of %s: its step and residuals start afresh", checkpoint, self.what)

    def _left_behind(self, checkpoint: object) -> None:
        log.warning(
            "the hook's state in %s is not loaded: %s is not attached here, or keeps none", checkpoint, self.what
        )


def bases(name: str, *modules: str) -> tuple[type, ...]:
    """Return the class of this name from each module in use, or from the first installed one if none is in use.

    Lightning comes as two packages with their own classes, and a trainer takes only those of its package.

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
