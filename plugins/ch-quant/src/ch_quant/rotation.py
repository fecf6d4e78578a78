"""The randomized Hadamard rotation of a block, ``y = H D x / sqrt(n)``.

``D`` is a fixed diagonal of random signs, ``H`` the Hadamard matrix. It spreads one large number over n numbers of similar
size, which a common scale fits better (SDP4Bit, arXiv:2410.15526; Suresh et al. 2017, arXiv:1611.00429). The rotation is linear
and orthonormal, so ranks may add rotated numbers and rotate the sum back once.

The rotation consists of sums and differences in a fixed order. A matrix product would cost the same, but round differently on
another processor or at another address in memory, and ranks would end with different bits.
"""

from functools import lru_cache

import torch


@lru_cache
def signs(block: int, device: torch.device) -> torch.Tensor:
    """Return ``D / sqrt(n)``, ``(block,)`` fp32, the same on every rank and in every step."""
    chance = torch.Generator("cpu").manual_seed(block)
    coins = torch.randint(0, 2, (block,), generator=chance, dtype=torch.int64, device="cpu")
    # From integers, torch would make numbers of the default dtype.
    made: torch.Tensor = (2.0 * coins.to(torch.float32) - 1.0) * block**-0.5
    return made.to(device)


def rotate(x: torch.Tensor, out: torch.Tensor, spare: torch.Tensor) -> torch.Tensor:
    """Return ``H D x / sqrt(n)`` of every row.

    Args:
        x: ``(rows, n)`` fp32, ``n`` a power of two.
        out: like ``x``; may be ``x`` itself.
        spare: like ``x``, overwritten.
    """
    torch.mul(x, signs(x.shape[1], x.device), out=out)
    return _hadamard(out, out, spare)


def turn_back(y: torch.Tensor, out: torch.Tensor, spare: torch.Tensor) -> torch.Tensor:
    """Return ``D H y / sqrt(n)`` of every row, the inverse of :func:`rotate`. Arguments as in :func:`rotate`."""
    return _hadamard(y, out, spare).mul_(signs(y.shape[1], y.device))


def _hadamard(x: torch.Tensor, out: torch.Tensor, spare: torch.Tensor) -> torch.Tensor:
    """Return ``H x`` of every row. The butterflies run on the transpose, because strided columns cost twice as much."""
    rows, n = x.shape
    here, there = spare.view(n, rows), out.view(n, rows)
    here.copy_(x.t())
    half = n // 2
    while half:
        pairs, target = here.view(-1, 2, half * rows), there.view(-1, 2, half * rows)
        torch.add(pairs[:, 0], pairs[:, 1], out=target[:, 0])
        torch.sub(pairs[:, 0], pairs[:, 1], out=target[:, 1])
        here, there = there, here
        half //= 2
    if here.data_ptr() == out.data_ptr():
        there.copy_(here)
        here = there
    return out.copy_(here.t())
