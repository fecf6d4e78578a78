"""torchtitan: an override that attaches a hook to the model and saves its state in torchtitan's checkpoints.

torchtitan builds its checkpointer last, with the parallelized model. So a subclass of the checkpointer can do both.
torchtitan divides the loss by the tokens of all ranks and sums the gradients. Residuals follow that
(:attr:`commhooks.Binding.sums`).

``--override.imports 'ch_fsdp.torchtitan.attach={"hook": "powersgd(rank=4)"}'``

With ``"gather": "quant8"`` the weight gathers are coded, too. ``"hook": ""`` leaves the gradients to torch.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ch_ddp import TrainerHook

try:
    from torchtitan.components.checkpointer import CheckpointManager
    from torchtitan.config.override import derive, override
except ImportError:  # `attach` raises it, so that tools can import every module of this package
    CheckpointManager = None

_KEY = "commhook"

if CheckpointManager is not None:

    class CommHookCheckpointManager(CheckpointManager):
        """Attaches a hook to every part of the model, and saves every rank's state in ``step-N/commhook``.

        Attributes:
            hooks: those of each part of the model. ``hooks[0].handle`` is the first handle of the first part.
        """

        @dataclass(kw_only=True, slots=True)
        class Config(CheckpointManager.Config):
            """torchtitan's own options, and the arguments of :func:`commhooks.attach`."""

            hook: Any = ""
            gather: Any = ""
            attach_options: dict[str, Any] = field(default_factory=dict)

        def __init__(self, config: Config, *, model_parts: list[Any], **given: Any) -> None:
            super().__init__(config, model_parts=model_parts, **given)
            self.hooks: list[TrainerHook] = []
            options = config.attach_options
            weights: dict[str, Any] = {"axis": "gather"}
            weights |= {key: options[key] for key in ("verify_ranks", "timeout") if key in options}
            for part in model_parts:
                for hook, how in ((config.hook, options), (config.gather, weights)):
                    if hook:
                        self.hooks.append(TrainerHook(hook, how))
                        self.hooks[-1].attach(part)

        def _save(self, curr_step: int, last_step: bool = False) -> bool:
            saved = bool(super()._save(curr_step, last_step))
            if saved and not (last_step and self.last_save_model_only):
                for number, hook in enumerate(self.hooks):
                    hook.save(self._folder(self._create_checkpoint_id(curr_step), number))
            return saved

        def dcp_load(self, state_dict: Any, checkpoint_id: str, from_hf: bool, from_quantized: bool) -> None:
            super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
            if "optimizer" in state_dict and not from_hf:  # a resumed run, not only initial weights
                for number, hook in enumerate(self.hooks):
                    hook.load(self._folder(checkpoint_id, number))

        def _folder(self, checkpoint: str, number: int) -> Path:
            return Path(checkpoint, f"{_KEY}{number or ''}")

    @override(target=CheckpointManager.Config, description="attach a communication hook")  # type: ignore[untyped-decorator]
    def attach(config: Any, hook: Any = "", gather: Any = "", **options: Any) -> Any:
        """Return torchtitan's config with a hook, and with one on weight gathers. Options as in :func:`commhooks.attach`."""
        return derive(config, CommHookCheckpointManager.Config, hook=hook, gather=gather, attach_options=options)

else:

    def attach(config: Any, hook: Any = "", gather: Any = "", **options: Any) -> Any:
        """Raise ``ImportError``, because torchtitan is not installed."""
        raise ImportError("ch_fsdp.torchtitan needs torchtitan: pip install 'torchtitan>=0.3'")
