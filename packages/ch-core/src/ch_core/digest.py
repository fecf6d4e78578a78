"""Digests of tensors: 64-bit numbers of their raw bytes, computed on the device of the tensors.

The bytes are read as 32-bit words x, with zeros after the last byte. A row of up to 4096 words has the sum of x * w modulo 2**64,
and its weights w are odd pseudo-random 64-bit numbers. An odd weight makes any change inside one word change the sum. Random
weights make several changes cancel with a probability of at most 2**-32, however regular they are: exchanged words, or a sign
flipped in many of them. (Weights 1, 3, 5, ... would let +1, -2, +1 in neighbours cancel. A word of 64 bits would let two flips
of its highest bit cancel under any odd weights.) The sums of rows are mixed, weighted and added up in the same way.

Integer arithmetic gives the same digest on every device. A digest protects against mistakes, not against an adversary.
"""

import hashlib
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from ch_core.sizes import SIZES

_ROW = SIZES.digest_row_words


@torch.no_grad()
def digests(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return a 0-d int64 tensor for each tensor, on its device. The host does not wait.

    A digest covers the raw bytes and their number, not the shape and the dtype. Of a DTensor, this rank's shard counts.

    Args:
        tensors: of any shapes, dtypes and devices.

    Example:
        >>> weight = torch.ones(2, 2)
        >>> before = digests([weight])
        >>> weight.view(torch.int32)[1, 0] ^= 1
        >>> digests([weight]) == before
        False
    """
    weights: dict[torch.device, torch.Tensor] = {}
    sums: dict[torch.device, list[torch.Tensor]] = {}  # of the rows of each tensor
    places = []
    for tensor in tensors:
        device = tensor.device
        if device not in weights:
            weights[device] = _weights(_ROW, device)
        plain = _plain(tensor.detach())
        size = sum(one.nbytes for one in plain)
        rows = [torch.full((1,), size, dtype=torch.int64, device=device)]  # words of zeros at the end add nothing
        for one in plain:
            rows += _row_sums(_words(one), weights[device])
        places.append((device, len(sums.setdefault(device, []))))
        sums[device].append(torch.cat(rows))
    found = {device: _fold(some) for device, some in sums.items()}
    return [found[device][place] for device, place in places]


def folded(rows: torch.Tensor) -> torch.Tensor:
    """Return one digest of many, shape (n,), in their order: a 0-d int64 tensor on their device."""
    return _fold([rows])[0]


def checksum(*tensors: torch.Tensor) -> str:
    """Return 16 hexadecimal digits that change with any bit, and with the shapes, dtypes or order, of the tensors.

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
    numbers: dict[int, int] = {}
    found = digests(tensors)
    for device in {one.device for one in found}:
        here = [place for place, one in enumerate(found) if one.device == device]
        numbers.update(zip(here, torch.stack([found[place] for place in here]).tolist(), strict=True))
    rows = [(tuple(one.shape), str(one.dtype), numbers[place]) for place, one in enumerate(tensors)]
    return hashlib.blake2b(repr(rows).encode(), digest_size=8).hexdigest()


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor as int32, ``(n,)``, with zeros after the last byte."""
    raw = tensor.contiguous().view(-1).view(torch.uint8)
    missing = -raw.numel() % 4
    if missing or raw.storage_offset() % 4:  # a view as int32 needs whole words at a multiple of four bytes
        raw = F.pad(raw, (0, missing))
    return raw.view(torch.int32)


def _row_sums(words: torch.Tensor, weights: torch.Tensor) -> list[torch.Tensor]:
    """Return the weighted sums of the rows, in vectors. The last row may be shorter."""
    whole = words.numel() // _ROW * _ROW
    together = (SIZES.digest_rows if words.is_cpu else 1 << 10) * _ROW  # a GPU wants few kernels
    sums = [(block.view(-1, _ROW) * weights).sum(1) for block in words[:whole].split(together) if whole]
    rest = words[whole:]
    return [*sums, (rest * weights[: rest.numel()]).sum(0, keepdim=True)] if rest.numel() else sums


def _fold(rows: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Return the weighted sum of each vector after mixing its numbers, as 0-d tensors. All are on one device."""
    counts = [one.numel() for one in rows]
    weights = _weights(max(counts), rows[0].device)
    mixed = _mixed(torch.cat(list(rows))) * torch.cat([weights[:count] for count in counts])
    return [one.sum() for one in mixed.split(counts)]


def _weights(count: int, device: torch.device) -> torch.Tensor:
    """Return odd pseudo-random numbers, shape (count,) int64. Their beginning is the same for every count."""
    numbers = torch.arange(1, count + 1, dtype=torch.int64, device=device)
    return _mixed(numbers.mul_(-7046029254386353131)).bitwise_or_(1)


def _mixed(numbers: torch.Tensor) -> torch.Tensor:
    """Map int64 numbers one to one so that every bit depends on all bits (SplitMix64, Steele et al. 2014)."""
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        numbers = (numbers ^ _shifted(numbers, shift)) * factor
    return numbers ^ _shifted(numbers, 31)


def _shifted(numbers: torch.Tensor, count: int) -> torch.Tensor:
    """Shift right and fill with zeros. torch repeats the sign, which would map two numbers to one."""
    return (numbers >> count) & ((1 << (64 - count)) - 1)


def _plain(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the dense tensors that hold a tensor's numbers. A wrapper subclass has no memory itself."""
    if hasattr(tensor, "__tensor_flatten__"):
        inside = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]  # a DTensor's has a mesh, too
        return [plain for part in inside if isinstance(part, torch.Tensor) for plain in _plain(part)]
    if tensor.is_sparse:
        tensor = tensor.coalesce()
        return [tensor.indices(), tensor.values()]
    return [tensor.resolve_conj().resolve_neg()]
