"""Hooks under trainers that own the training loop: a module for each, and what they have in common."""

from typing import TYPE_CHECKING

from commhooks import lazy

if TYPE_CHECKING:
    from ch_ddp.frameworks.trainer_hook import TrainerHook

__all__ = ["TrainerHook"]

__getattr__, __dir__ = lazy(__name__, {"trainer_hook": "TrainerHook"})
