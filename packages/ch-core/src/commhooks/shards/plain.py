"""The plain average of sharded gradients."""

from collections.abc import Callable, Generator

import torch

from commhooks.requests import ReduceScatter, Requests
from commhooks.shards.layout import Shards


def plain_scatter(shards: Shards, scratch: Callable[..., torch.Tensor]) -> Generator[Requests, None, None]:
    """Average the parameters as they are: one reduce-scatter, of a copy where they are not all that a part holds.

    Args:
        shards: the parameters.
        scratch: ``ctx.scratch``.
    """
    segments, n, world = shards.layout.part.segments(), shards.output.numel(), shards.world_size
    if segments == ((0, n),):
        yield ReduceScatter(shards.storage, shards.output, "mean")
        return
    size = sum(numel for _, numel in segments)
    dtype, device = shards.storage.dtype, shards.device
    packed, mine = scratch("plain", (world, size), dtype, device), scratch("plain part", (size,), dtype, device)
    parts, at = shards.storage.view(world, n), 0
    for offset, numel in segments:
        packed[:, at : at + numel].copy_(parts[:, offset : offset + numel])
        at += numel
    if size:
        yield ReduceScatter(packed.view(-1), mine, "mean")
    at = 0
    for offset, numel in segments:
        shards.output[offset : offset + numel].copy_(mine[at : at + numel])
        at += numel
