"""Adapter for Accelerate: a kwargs handler that attaches a hook. No other module imports this one.

Accelerate's own ``DistributedDataParallelKwargs(comm_hook=...)`` takes members of an enum and silently ignores others
(1.15). Its checkpoints hold the state of rank 0 only.
"""

import inspect
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch

from ch_ddp.frameworks.trainer_hook import TrainerHook, What, bases
from commhooks import AttachError

__all__ = ["CommHookKwargs"]

_BASES = bases("DistributedDataParallelKwargs", "accelerate.utils")

if TYPE_CHECKING:
    from accelerate.utils import DistributedDataParallelKwargs
else:
    DistributedDataParallelKwargs = _BASES[0] if _BASES else object

_KEY = "commhook"


class CommHookKwargs(DistributedDataParallelKwargs):
    """Makes ``accelerator.prepare`` attach a hook to each model that it wraps in DDP.

    ``accelerator.save_state(folder)`` writes every rank's state of the hook to ``folder/commhook`` (for a second model
    ``commhook1``). ``load_state`` loads it, on any number of ranks.

    Args:
        what: hook, as for :func:`commhooks.attach`.
        attach_options: further arguments of :func:`commhooks.attach`.
        options: options of ``DistributedDataParallelKwargs``.

    Attributes:
        hooks: one per model, in the order of preparation. ``hooks[0].handle`` is the handle of
            :func:`commhooks.attach`.

    Raises:
        ImportError: Accelerate is not installed.

    ``Accelerator(kwargs_handlers=[CommHookKwargs("powersgd(rank=4)")])``
    """

    def __init__(self, what: What, attach_options: Mapping[str, Any] | None = None, **options: Any) -> None:
        if not _BASES:
            raise ImportError("CommHookKwargs needs Accelerate: pip install 'accelerate>=1'")
        super().__init__(**options)
        self.what, self.attach_options = what, dict(attach_options or {})
        self.hooks: list[TrainerHook] = []

    @property  # type: ignore[misc]  # Accelerate looks handlers up by exact class, and knows only its own
    def __class__(self) -> Any:
        return DistributedDataParallelKwargs

    def to_kwargs(self) -> dict[str, Any]:
        """Return the arguments of DDP's constructor that differ from their defaults."""
        given = DistributedDataParallelKwargs(**{name: getattr(self, name) for name in self.__dataclass_fields__})
        return dict(given.to_kwargs())

    def register_comm_hook(self, model: torch.nn.Module) -> None:
        """Attach to a model in DDP. ``accelerator.prepare`` calls this."""
        accelerator = _caller(inspect.currentframe())
        if not self.hooks:
            accelerator.register_save_state_pre_hook(self._save)
            accelerator.register_load_state_pre_hook(self._load)
        self.hooks.append(TrainerHook(self.what, self.attach_options))
        self.hooks[-1].attach(model, accelerator.scaler)

    def _save(self, models: object, weights: object, folder: str) -> None:
        for number, hook in enumerate(self.hooks):
            hook.save(Path(folder, f"{_KEY}{number or ''}"))

    def _load(self, models: object, folder: str) -> None:
        for number, hook in enumerate(self.hooks):
            hook.load(Path(folder, f"{_KEY}{number or ''}"))


def _caller(frame: FrameType | None) -> Any:
    """Return the calling accelerator. It passes only the model to a handler, but saving and loading need the accelerator."""
    from accelerate import Accelerator

    above = frame.f_back if frame is not None else None
    found = above.f_locals.get("self") if above is not None else None
    if not isinstance(found, Accelerator):
        raise AttachError(
            f"CommHookKwargs is registered by Accelerator.prepare(), not by {type(found).__name__}: give it to "
            "Accelerator(kwargs_handlers=[...]), or attach to the model itself with commhooks.attach()"
        )
    return found
