"""A cheap fingerprint of a model's parameters on this rank: which checkpoint they are of."""

import hashlib
from collections.abc import Sequence

import torch

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def digest(params: Sequence[torch.Tensor]) -> str:
    """16 hexadecimal digits that change with any bit of the parameters: of a DTensor, of this rank's shard.

    Each parameter's bits are added up as integers, modulo 2**64: one pass over the parameters, one small copy to the host.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2, 2))
        >>> before = digest([weight])
        >>> weight.data[0, 0] += 1e-6
        >>> before == digest([weight])
        False
    """
    sums: dict[torch.device, list[torch.Tensor]] = {}
    for param in params:
        local: torch.Tensor = getattr(param, "_local_tensor", param).detach()
        if local.is_complex():
            local = torch.view_as_real(local)
        bits = local.view(_BITS[local.element_size()])
        sums.setdefault(local.device, []).append(bits.sum(dtype=torch.int64))
    numbers = [torch.stack(some).tolist() for some in sums.values()]
    shapes = [tuple(param.shape) for param in params]
    return hashlib.blake2b(repr((shapes, numbers)).encode(), digest_size=8).hexdigest()
