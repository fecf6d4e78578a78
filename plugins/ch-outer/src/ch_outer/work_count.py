"""Counts what a rank trains on: tokens, samples or steps."""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves


class Work:
    """Counts the inputs of a model's forwards with gradients.

    A call with an integer tensor of two dimensions or more counts its elements as tokens, padding included. Another call counts
    the first dimension of its first tensor as samples.

    Args:
        model: is called by the script. Calls of its parts are not counted.
        begin: called before each forward with gradients.

    Attributes:
        done: tokens or samples so far. 0 if the script calls only parts of the model.
        unit: ``"tokens"``, ``"samples"``, or ``""`` before the first call.

    Example:
        >>> model = torch.nn.Embedding(9, 2)
        >>> work = Work(model)
        >>> _ = model(torch.zeros(4, 8, dtype=torch.int64))
        >>> work.done, work.unit
        (32, 'tokens')
    """

    def __init__(self, model: torch.nn.Module, begin: Callable[[], None] = lambda: None) -> None:
        self.done, self.unit, self._begin = 0, "", begin
        # `commhooks run` creates this object in a pre-hook of the first forward. torch calls no hook of the wrapper that was
        # added since, but those of the module inside.
        called = model.module if isinstance(model, DistributedDataParallel) else model
        called.register_forward_pre_hook(torch.compiler.disable(self._called), with_kwargs=True)

    def _called(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not (torch.is_grad_enabled() and module.training):
            return
        self._begin()
        named = kwargs.get("input_ids")
        tensors = [one for one in tree_leaves((named, args, kwargs)) if isinstance(one, torch.Tensor)]
        tokens = next((t for t in tensors if t.dim() > 1 and not t.is_floating_point() and not t.is_complex()), None)
        if tokens is not None and tokens.dtype != torch.bool:
            self.done, self.unit = self.done + tokens.numel(), "tokens"
        elif tensors and tensors[0].dim():
            self.done, self.unit = self.done + len(tensors[0]), self.unit or "samples"
