"""Adapter for Fabric: the DDP strategy with a hook. No other module imports this one.

``Fabric(strategy="ddp")`` takes no hook, and its checkpoints hold the state of rank 0 only. A strategy wraps the model and
writes the checkpoints, so it can do both.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ch_ddp.frameworks.trainer_hook import TrainerHook, What, bases

__all__ = ["CommHookDDPStrategy"]

_BASES = bases("DDPStrategy", "lightning.fabric.strategies", "lightning_fabric.strategies")

if TYPE_CHECKING:
    from lightning.fabric.strategies import DDPStrategy
else:
    DDPStrategy = _BASES[0] if _BASES else object

_KEY = "commhook"


class CommHookDDPStrategy(DDPStrategy):
    """Wraps models as Fabric's ``DDPStrategy`` does, and attaches a hook to each.

    ``fabric.save`` adds every rank's state of the hook under ``"commhook"`` (for a second model ``"commhook1"``), gathered
    on rank 0. ``fabric.load`` into a dict of objects loads it, on any number of ranks. Set the models up before loading.

    Args:
        what: hook, as for :func:`commhooks.attach`.
        attach_options: further arguments of :func:`commhooks.attach`.
        options: options of ``DDPStrategy``.

    Attributes:
        hooks: one per model, in the order of set-up. ``hooks[0].handle`` is the handle of
            :func:`commhooks.attach`.

    Raises:
        ImportError: Lightning is not installed.

    ``Fabric(strategy=CommHookDDPStrategy("powersgd(rank=4)"), devices=2)``
    """

    def __init__(self, what: What, attach_options: Mapping[str, Any] | None = None, **options: Any) -> None:
        if not _BASES:
            raise ImportError("CommHookDDPStrategy needs Lightning: pip install 'lightning>=2.2'")
        super().__init__(**options)
        self.what, self.attach_options = what, dict(attach_options or {})
        self.hooks: list[TrainerHook] = []

    def setup_module(self, module: Any) -> Any:
        wrapped = super().setup_module(module)
        hook = TrainerHook(self.what, self.attach_options)
        hook.attach(wrapped, getattr(self.precision, "scaler", None))
        self.hooks.append(hook)
        return wrapped

    def save_checkpoint(self, path: Any, state: dict[str, Any], *args: Any, **options: Any) -> None:
        gathered = {self._key(number): hook.gather() for number, hook in enumerate(self.hooks) if hook.keeps_state}
        super().save_checkpoint(path, {**state, **gathered}, *args, **options)

    def load_checkpoint(self, path: Any, state: Any = None, *args: Any, **options: Any) -> dict[str, Any]:
        rest: dict[str, Any] = super().load_checkpoint(path, state, *args, **options)
        if isinstance(state, Mapping) and state:
            for number, hook in enumerate(self.hooks):
                saved = rest.pop(self._key(number), None)
                if saved:
                    hook.load_gathered(saved)
                else:
                    hook.starts_afresh(path)
        return rest

    def _key(self, number: int) -> str:
        return f"{_KEY}{number or ''}"
