"""Adapter for the Hugging Face ``Trainer``: a callback that attaches a hook. No other module imports this one.

The ``Trainer`` passes the model without its wrapper to callbacks. This callback therefore records every DDP wrapper from
torch's registration hook for modules, and attaches when training begins.
"""

import json
import weakref
from collections.abc import Callable, Mapping
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from ch_ddp.frameworks.trainer_hook import TrainerHook, What, bases
from commhooks import CommHook, HookNotSupportedError, StateError

__all__ = ["CommHookCallback"]

_BASES = bases("TrainerCallback", "transformers.trainer_callback")

if TYPE_CHECKING:
    from transformers.trainer_callback import TrainerCallback
else:
    TrainerCallback = _BASES[0] if _BASES else object

_KEY = "commhook"


class _Arguments(Protocol):
    """Parts of ``TrainingArguments``."""

    output_dir: str
    resume_from_checkpoint: str | None


class _State(Protocol):
    """Parts of ``TrainerState``."""

    global_step: int
    log_history: list[dict[str, float]]


class CommHookCallback(TrainerCallback):
    """Attaches a hook when training begins.

    Every ``checkpoint-N`` has every rank's state of the hook in its folder ``commhook``. ``trainer.train(
    resume_from_checkpoint=...)`` loads it, on any number of ranks.

    Args:
        what: hook, as for :func:`commhooks.attach`.
        resume_from_checkpoint: the folder that you pass to ``trainer.train``, which does not pass it to callbacks. Needed
            only for a checkpoint outside of ``output_dir``.
        options: further arguments of :func:`commhooks.attach`.

    Raises:
        ImportError: transformers is not installed.
        HookNotSupportedError: when training begins, ``weighted=True`` under ``average_tokens_across_devices``, with which the
            Trainer weighs the ranks itself.

    ``Trainer(..., callbacks=[CommHookCallback("powersgd(rank=4)")])``
    """

    def __init__(
        self, what: What, *, resume_from_checkpoint: str | PathLike[str] | None = None, **options: Any
    ) -> None:
        if not _BASES:
            raise ImportError("CommHookCallback needs transformers: pip install transformers accelerate")
        self.hook = TrainerHook(what, options)
        self.resume_from_checkpoint = resume_from_checkpoint
        self._wrappers: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        watch = register_module_module_registration_hook(_noting(self._wrappers))
        weakref.finalize(self, watch.remove)

    @property
    def handle(self) -> CommHook | None:
        """The attached hook, once training has begun; ``None`` in one process."""
        return self.hook.handle

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **others: Any) -> None:
        refuse_second_weights(self.hook.options, args)
        wrapped = next((ddp for ddp in self._wrappers if any(each is model for each in ddp.modules())), model)
        self.hook.attach(wrapped, getattr(others.get("optimizer"), "scaler", None))
        if state.global_step and self.hook.keeps_state:
            self.hook.load(self._resumed_from(args, state) / _KEY)

    def on_save(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.hook.save(_checkpoint(args, state) / _KEY)

    def _resumed_from(self, args: "_Arguments", state: "_State") -> Path:
        """Return the checkpoint of this trainer state.

        Raises:
            StateError: a callback cannot find it.
        """
        given = [self.resume_from_checkpoint, args.resume_from_checkpoint, _checkpoint(args, state)]
        places = [Path(each) for each in given if isinstance(each, str | PathLike)]
        for place in places:
            if _is_of(place, state):
                return place
        raise StateError(
            f"training resumes at step {state.global_step}, but none of {', '.join(map(str, places))} is a checkpoint of this "
            "step, and the Trainer does not tell its callbacks the folder. Give it to the callback, too: "
            "CommHookCallback(..., resume_from_checkpoint=folder)"
        )


def refuse_second_weights(options: Mapping[str, Any], args: object) -> None:
    """Refuse ``weighted=True`` if the Trainer weighs the ranks itself, because they would be weighed twice.

    Args:
        options: arguments of :func:`commhooks.attach`.
        args: the ``TrainingArguments``.

    Raises:
        HookNotSupportedError: see above.
    """
    if options.get("weighted") and getattr(args, "average_tokens_across_devices", False):
        raise HookNotSupportedError(
            "weighted=True: this Trainer divides each loss by the tokens of all ranks already "
            "(TrainingArguments(average_tokens_across_devices=True), the default), so the ranks would be weighed twice. Omit "
            "weighted=, or set average_tokens_across_devices=False and call weigh() in your training_step()"
        )


def _noting(
    wrappers: "weakref.WeakSet[torch.nn.Module]",
) -> Callable[[torch.nn.Module, str, torch.nn.Module | None], None]:
    def note(module: torch.nn.Module, name: str, submodule: torch.nn.Module | None) -> None:
        if isinstance(module, DistributedDataParallel):
            wrappers.add(module)

    return note


def _checkpoint(args: _Arguments, state: _State) -> Path:
    return Path(args.output_dir, f"checkpoint-{state.global_step}")


def _is_of(folder: Path, state: _State) -> bool:
    """Return True if this trainer state was read from the checkpoint."""
    try:
        saved = json.loads((folder / "trainer_state.json").read_text())
    except (OSError, ValueError):
        return False
    return bool(saved["global_step"] == state.global_step and saved["log_history"] == state.log_history)
