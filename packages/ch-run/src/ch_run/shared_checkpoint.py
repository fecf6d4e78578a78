"""Lets a script's checkpoints hold the model that all ranks share, although ranks hold different parameters between rounds.

`state_dict()` of the model and of its parts returns the shared values. No message is sent for this, so one rank may save
alone.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

Shared = Callable[[], list[tuple[torch.Tensor, torch.Tensor]]]
"""Returns pairs of a live parameter or buffer and its shared value."""


def share_checkpoints(model: torch.nn.Module, shared: Shared) -> Callable[[], None]:
    """Put shared values into each `state_dict()` of a model from now on. Return a function that ends this."""
    hook = partial(_put_shared, shared)
    hooks = [part.register_state_dict_post_hook(hook) for part in model.modules()]

    def stop() -> None:
        for one in hooks:
            one.remove()

    return stop


def _put_shared(
    shared: Shared, module: torch.nn.Module, state_dict: dict[str, Any], prefix: str, metadata: dict[str, Any]
) -> None:
    """Replace the entries of a module's own parameters and buffers."""
    own = {name: t for name, t in (*module._parameters.items(), *module._buffers.items()) if t is not None}
    keys = [(prefix + name, tensor) for name, tensor in own.items() if prefix + name in state_dict]
    if not keys:
        return
    found = {_place(live): value for live, value in shared()}
    for key, tensor in keys:
        value = found.get(_place(tensor))
        if value is not None and state_dict[key] is not tensor:  # with keep_vars=True the caller wants the parameter
            # A copy, because a script that writes to its state dict must not move the start of the next round.
            state_dict[key] = like(tensor, value)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a tensor on this rank, detached: the shard of a DTensor, otherwise the tensor."""
    found: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return found.detach()


def like(tensor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return a copy of a value of this rank in the dtype of a tensor, and sharded like it."""
    if not hasattr(tensor, "to_local"):
        return value.detach().to(dtype=tensor.dtype, copy=True)
    sharded = tensor.detach().clone()
    local(sharded).copy_(value)
    return sharded


def _place(tensor: torch.Tensor) -> tuple[int, torch.Size, torch.dtype]:
    """Return the memory of a tensor, by which its detached aliases are known."""
    mine = local(tensor)
    return mine.data_ptr(), mine.shape, mine.dtype
