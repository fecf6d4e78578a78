"""Digests of tensors: numbers that change with any bit, computed on the device of the tensors."""

import hashlib
from collections.abc import Sequence

import torch

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK = 1 << 20  # elements that are widened to int64 at a time: 8 MiB


@torch.no_grad()
def digests(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return a 0-d int64 tensor for each tensor, on its device. The host does not wait.

    A chunk of 2**20 elements adds up its bits as integers with odd weights, modulo 2**64, in one pass. Any flipped bit
    changes the sum. Equal bits give equal digests on every device. A digest protects against mistakes, not against an
    adversary. Of a DTensor, this rank's shard counts.

    Args:
        tensors: of any shapes, dtypes and devices.

    Example:
        >>> weight = torch.ones(2, 2)
        >>> before = digests([weight])
        >>> weight.view(torch.int32)[1, 0] ^= 1
        >>> digests([weight]) == before
        False
    """
    weights: dict[torch.device, torch.Tensor] = {}  # odd numbers
    found = []
    for tensor in tensors:
        total = None
        number = 0
        for plain in _plain(tensor.detach()):
            bits = plain.contiguous().view(-1).view(_BITS[plain.element_size()])  # (numel,)
            longest = min(_CHUNK, bits.numel())
            if bits.device not in weights or weights[bits.device].numel() < longest:
                weights[bits.device] = torch.arange(1, 2 * longest + 1, 2, dtype=torch.int64, device=bits.device)
            for part in bits.split(_CHUNK):
                some = _weighted_sum(part, weights[bits.device][: part.numel()])
                total = some if total is None else total.add_(some, alpha=2 * number + 1)
                number += 1
        found.append(torch.zeros((), dtype=torch.int64, device=tensor.device) if total is None else total)
    return found


def _weighted_sum(bits: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    if bits.is_cpu:  # half the time of a product, which torch widens element by element; CUDA has no integer dot
        return torch.dot(bits.long(), weights)
    return (bits * weights).sum()


def folded(rows: torch.Tensor) -> torch.Tensor:
    """Return one digest of many, shape (n,), in their order: a 0-d int64 tensor on their device."""
    mixed = (rows ^ (rows >> 29)) * -4658895280553007687  # odd, so that no digest is lost
    mixed ^= mixed >> 32
    weights = torch.arange(1, 2 * rows.numel() + 1, 2, dtype=torch.int64, device=rows.device)
    return (mixed * weights).sum()


def checksum(*tensors: torch.Tensor) -> str:
    """Return 16 hexadecimal digits that change with any bit, and with the shape or order, of the tensors.

    See :func:`digests`. The host waits for one small copy of each device.

    Args:
        tensors: of any shapes, dtypes and devices.

    Example:
        >>> weight = torch.ones(2, 2)
        >>> before = checksum(weight)
        >>> weight[0, 0] += 1e-6
        >>> before == checksum(weight)
        False
        >>> checksum(torch.zeros(2)) == checksum(-torch.zeros(2))
        False
    """
    sums: dict[torch.device, list[torch.Tensor]] = {}
    for one in digests(tensors):
        sums.setdefault(one.device, []).append(one)
    numbers = [torch.stack(some).tolist() for some in sums.values()]
    shapes = [tuple(tensor.shape) for tensor in tensors]
    return hashlib.blake2b(repr((shapes, numbers)).encode(), digest_size=8).hexdigest()


def _plain(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors that hold a tensor's memory: a wrapper subclass has no memory itself."""
    if hasattr(tensor, "__tensor_flatten__"):
        inside = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]  # a DTensor's has a mesh, too
        return [plain for part in inside if isinstance(part, torch.Tensor) for plain in _plain(part)]
    return [torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor]
