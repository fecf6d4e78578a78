"""Averaging of parameters, in place.

One message per dtype and device. Each parameter keeps its own storage and strides, so optimizers, views and
channels-last layouts are not disturbed.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from commhooks.adapters import TUNED, ProcessGroupTransport

Params = Iterable[torch.Tensor] | Iterable[Mapping[str, Any]]
"""Parameters, or an optimizer's ``param_groups``."""


def average_parameters(params: Params, process_group: dist.ProcessGroup | None = None) -> None:
    """Set every parameter to its average over the group.

    All trainable parameters that are given take part, with a gradient or not, so that ranks which used different ones
    still exchange messages of one size. An empty list is nothing to do, and so is a rank outside the group.

    Args:
        params: parameters, or an optimizer's ``param_groups``.
        process_group: the group to average over; ``None`` is the default group.

    Raises:
        ValueError: a parameter has no average (an integer).
        TransportError: there is no process group, or the collective failed.

    Example:
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> model = torch.nn.Linear(2, 2)
        >>> before = model.weight.detach().clone()
        >>> average_parameters(model.parameters())
        >>> torch.equal(before, model.weight)
        True
        >>> dist.destroy_process_group()
    """
    together: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for p in trainable(params):
        together.setdefault((p.dtype, p.device), []).append(p)
    if process_group is not None and dist.get_rank(process_group) < 0:
        return
    transport = ProcessGroupTransport(process_group)
    with torch.no_grad():
        for same in together.values():
            flat = torch.cat([p.detach().reshape(-1) for p in same])
            flat.mul_(1.0 / transport.world_size)
            TUNED.wait(transport.all_reduce(torch.view_as_real(flat) if flat.is_complex() else flat, "sum"), flat, None)
            for p, piece in zip(same, flat.split([p.numel() for p in same]), strict=True):
                p.copy_(piece.view(p.shape))


def trainable(params: Params) -> list[torch.Tensor]:
    """The parameters that require a gradient, each once, in the order given.

    Raises:
        ValueError: one is not floating-point or complex.
    """
    found: dict[int, torch.Tensor] = {}
    for entry in params:
        group = [entry] if isinstance(entry, torch.Tensor) else entry["params"]
        found |= {id(p): p for p in group if p.requires_grad}
    for p in found.values():
        if not (p.is_floating_point() or p.is_complex()):
            raise ValueError(f"a parameter of {p.dtype} and shape {tuple(p.shape)} has no average; leave it out")
    return list(found.values())
