"""The digest that shows whether all ranks hold the same gradients."""

from collections.abc import Iterable

import torch

from commhooks import RankMismatchError


def digest(buffers: Iterable[torch.Tensor]) -> torch.Tensor:
    """Two int64 numbers that differ, as good as surely, where one bit of the buffers differs.

    The first is the sum of the bit patterns, the second the sum weighted by position modulo a prime, so that swapped
    values show. One pass each over the gradient.
    """
    total = torch.zeros(2, dtype=torch.int64, device="cpu")
    for number, buffer in enumerate(buffers):
        flat = (buffer.coalesce().values() if buffer.is_sparse else buffer).detach().reshape(-1)
        flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
        bits = flat.contiguous().view(_BITS[flat.dtype.itemsize]).to(torch.int64)
        weights = torch.arange(bits.numel(), dtype=torch.int64, device=bits.device).remainder_(8191).add_(number + 1)
        total += torch.stack([bits.sum(), (bits * weights).sum()]).cpu()
    return total


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def differing(name: str, digests: torch.Tensor) -> BaseException | None:
    """The error where the rows of ``digests``, one per rank, are not all the same; ``None`` where they are."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank, row in enumerate(digests.tolist()):
        groups.setdefault(tuple(row), []).append(rank)
    if len(groups) == 1:
        return None
    shown = " / ".join(", ".join(map(str, ranks)) for ranks in sorted(groups.values(), key=len, reverse=True))
    return RankMismatchError(
        f"{name}: after the hook the gradients are not the same on all ranks; these ranks agree with one another: "
        f"{shown}. The hook's result depends on the rank, or ranks have run different collectives"
    )
