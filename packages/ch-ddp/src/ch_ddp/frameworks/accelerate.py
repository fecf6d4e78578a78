"""Accelerate: a kwargs handler that attaches a hook. Nothing else imports this module.

Accelerate's own ``DistributedDataParallelKwargs(comm_hook=...)`` takes the members of an enum and drops all else without
a word (1.15), and its checkpoints hold what rank 0 has.
"""

import inspect
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

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
    """Has ``accelerator.prepare`` attach a hook to the model that it wraps in DDP, to each if there are several.

    ``accelerator.save_state(folder)`` writes every rank's state of the hook to ``folder/commhook`` (of a second model
    ``commhook1``), and ``load_state`` goes on from it, with the same number of ranks or another.

    Args:
        what: as for :func:`commhooks.attach`.
        attach_options: further arguments of :func:`commhooks.attach`.
        options: those of ``DistributedDataParallelKwargs``.

    Attributes:
        hooks: one for each model, in the order in which they were prepared; ``hooks[0].handle`` is what
            :func:`commhooks.attach` returned.

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

    @property  # type: ignore[misc]  # Accelerate finds a handler's use by its exact class, and knows its own alone
    def __class__(self) -> Any:
        return DistributedDataParallelKwargs

    def to_kwargs(self) -> dict[str, Any]:
        """The arguments of DDP's constructor that differ from their defaults."""
        given = DistributedDataParallelKwargs(**{name: getattr(self, name) for name in self.__dataclass_fields__})
        return dict(given.to_kwargs())

    def register_comm_hook(self, model: Any) -> None:
        """Called by ``accelerator.prepare`` with the model in DDP."""
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
    """The accelerator that calls: it hands a handler the model alone, and saving and loading are its own."""
    from accelerate import Accelerator

    above = frame.f_back if frame is not None else None
    found = above.f_locals.get("self") if above is not None else None
    if not isinstance(found, Accelerator):
        raise AttachError(
            f"CommHookKwargs is registered by Accelerator.prepare(), not by {type(found).__name__}: give it to "
            "Accelerator(kwargs_handlers=[...]), or attach to the model itself with commhooks.attach()"
        )
    return found
