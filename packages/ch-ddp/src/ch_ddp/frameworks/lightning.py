"""Adapter for Lightning: a callback for the ``Trainer``. No other module imports this one.

Lightning's own ``DDPStrategy(ddp_comm_hook=...)`` registers a hook on CUDA only, and silently ignores it elsewhere (2.6).
A callback sees the wrapped model on every device.
"""

from typing import TYPE_CHECKING, Any

from ch_ddp.frameworks.trainer_hook import TrainerHook, What, bases
from commhooks import CommHook

__all__ = ["CommHookCallback"]

_BASES = bases("Callback", "lightning.pytorch.callbacks", "pytorch_lightning.callbacks")

if TYPE_CHECKING:
    from lightning.pytorch.callbacks import Callback
else:
    # It derives from both packages' classes if both are in use, because config parsers check it.
    Callback = type("Callback", _BASES or (object,), {})


class CommHookCallback(Callback):
    """Attaches a hook when fitting starts, and again to the new model that every further ``fit`` wraps.

    Trainer checkpoints store every rank's state of the hook among the callbacks' states. Rank 0, which writes them, gathers it.
    ``trainer.fit(ckpt_path=...)`` loads it, on any number of ranks.

    Args:
        what: hook, as for :func:`commhooks.attach`.
        options: further arguments of :func:`commhooks.attach`.

    Raises:
        ImportError: Lightning is not installed.

    ``Trainer(strategy="ddp", callbacks=[CommHookCallback("powersgd(rank=4)")])``
    """

    def __init__(self, what: What, **options: Any) -> None:
        if not _BASES:
            raise ImportError("CommHookCallback needs Lightning: pip install 'lightning>=2.2'")
        self.hook = TrainerHook(what, options)
        self._resume: dict[str, Any] = {}

    @property
    def handle(self) -> CommHook | None:
        """The attached hook, from the start of the first ``fit`` on; ``None`` in one process."""
        return self.hook.handle

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.hook.attach(trainer.strategy.model, getattr(trainer.precision_plugin, "scaler", None))

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        # Not earlier, because sharding strategies restore a checkpoint after on_fit_start.
        if self._resume:
            self.hook.load_gathered(self._resume)
        elif trainer.ckpt_path is not None:
            self.hook.starts_afresh(trainer.ckpt_path)
        self._resume = {}

    def state_dict(self) -> dict[str, Any]:
        return self.hook.gather()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._resume = state_dict
