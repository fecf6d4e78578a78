"""Adapter for Ray Train: ``prepare_model`` with a hook. No other module imports this one.

Ray passes ``parallel_strategy_kwargs`` to DDP's constructor, which takes no hook. Each worker reports its own folder as a
checkpoint, and Ray merges the folders of all workers.
"""

from collections.abc import Mapping
from typing import Any

import torch

from ch_ddp.frameworks.trainer_hook import TrainerHook, What

__all__ = ["prepare_model"]


def prepare_model(
    model: torch.nn.Module, what: What, attach_options: Mapping[str, Any] | None = None, **options: Any
) -> tuple[torch.nn.Module, TrainerHook]:
    """Call ``ray.train.torch.prepare_model`` and attach a hook to its result.

    Args:
        model: the model, on each worker.
        what: hook, as for :func:`commhooks.attach`.
        attach_options: further arguments of :func:`commhooks.attach`.
        options: options of Ray's ``prepare_model``.

    Returns:
        The wrapped model, and the hook: ``hook.handle``, and for checkpoints ``hook.save(folder)`` and
        ``hook.load(folder)``, which every worker calls.

    Raises:
        ImportError: Ray Train is not installed.

    ``model, hook = prepare_model(model, "powersgd(rank=4)")``
    """
    try:
        from ray.train.torch import prepare_model as prepare
    except ImportError as error:
        raise ImportError("ch_ddp.frameworks.ray needs Ray Train: pip install 'ray[train]'") from error
    wrapped: torch.nn.Module = prepare(model, **options)
    hook = TrainerHook(what, attach_options or {})
    hook.attach(wrapped)
    return wrapped, hook
