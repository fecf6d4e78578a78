"""Chunks of a bucket, and the choice of the entries that are sent."""

import torch

from ch_sparse.sizes import SIZES
from commhooks import BucketLayout


class Chunks:
    """A bucket's parameters in a grid of chunks, and the entries that are chosen from each.

    Each parameter starts a new chunk, so results do not depend on the buckets. A chunk of n elements has
    ``max(1, round(density * n))`` entries. The last chunk of a parameter may be shorter and has fewer.

    Args:
        layout: the bucket's.
        chunk: number of elements of a chunk.
        density: part of them that is chosen.

    Attributes:
        rows: number of chunks.
        k: number of entries of a whole chunk.
        total: number of entries of all chunks.
        counts: number of entries of each chunk, ``(rows, 1)`` fp32.
        row: the chunk of each entry, ``(total,)`` int64.
    """

    def __init__(self, layout: BucketLayout, chunk: int, density: float) -> None:
        def entries(elements: int) -> int:
            return max(1, round(density * elements))

        self.sizes = [-(-p.numel // chunk) for p in layout.params]
        self.rows, self.k, self._chunk = sum(self.sizes), entries(chunk), chunk
        counts = torch.full((self.rows,), self.k, dtype=torch.int64, device="cpu")
        last = torch.tensor(self.sizes, dtype=torch.int64, device="cpu").cumsum(0) - 1
        rests = [p.numel - (size - 1) * chunk for p, size in zip(layout.params, self.sizes, strict=True)]
        counts[last] = torch.tensor([entries(rest) for rest in rests], dtype=torch.int64, device="cpu")
        chosen = torch.arange(self.k, dtype=torch.int64, device="cpu") < counts.view(-1, 1)  # (rows, k)
        row, column = chosen.nonzero(as_tuple=True)
        self.total = row.numel()
        self.row, self.counts = row.to(layout.device), counts.view(-1, 1).float().to(layout.device)
        self._kept = (row * self.k + column).to(layout.device) if self.total < chosen.numel() else None
        self._base = self.row * chunk

    def places(self, grid: torch.Tensor) -> list[torch.Tensor]:
        """Return each parameter's part of ``grid`` ``(rows, chunk)``, as 1-D views."""
        return [rows.view(-1) for rows in grid.split(self.sizes)]

    def entries(self, columns: torch.Tensor) -> torch.Tensor:
        """Return the elements of ``columns`` ``(rows, k)`` that are sent, ``(total,)``. A short chunk sends its first ones."""
        flat = columns.view(-1)
        return flat if self._kept is None else flat[self._kept]

    def positions(self, indices: torch.Tensor) -> torch.Tensor:
        """Return the positions in the flat grid, ``(total,)``, of entries at ``indices`` in their chunks."""
        return self._base + indices


def largest(grid: torch.Tensor, k: int) -> torch.Tensor:
    """Return the columns of the ``k`` largest magnitudes of every row, ``(rows, k)`` int64, largest first. NaN is the largest.

    On a CPU each call handles as many rows as the cache holds. Otherwise the passes over memory cost as much as the choice.

    >>> largest(torch.tensor([[1.0, -5.0, 0.0, 2.0]]), 2)
    tensor([[1, 3]])
    """
    if grid.device.type != "cpu":
        return _largest(grid, k)
    return torch.cat([_largest(rows, k) for rows in grid.split(max(1, SIZES.cached_elements // grid.shape[1]))])


def _largest(grid: torch.Tensor, k: int) -> torch.Tensor:
    """Search only the k blocks of a row with the largest maxima, because they hold the k largest elements.

    ``topk`` costs far more per element than a maximum.
    """
    rows, chunk = grid.shape
    magnitude = grid.abs()
    size = _block(chunk, k)
    if size == 1:
        return magnitude.topk(k, dim=1).indices
    count = chunk // size  # blocks; element j is in block j % count, so that the maximum runs over contiguous rows
    blocks = magnitude.view(rows, size, count).amax(1).topk(k, dim=1, sorted=False).indices  # (rows, k)
    steps = torch.arange(0, chunk, count, device=grid.device, dtype=torch.int64).view(1, size, 1)
    candidates = (blocks.unsqueeze(1) + steps).view(rows, size * k)
    found = magnitude.gather(1, candidates).topk(k, dim=1).indices
    return candidates.gather(1, found)


def _block(chunk: int, k: int) -> int:
    """Return the block size, a divisor of ``chunk``, for which ``topk`` sees the fewest elements; 1 if none saves much.

    >>> _block(4096, 41), _block(4096, 2048), _block(4093, 41)
    (8, 1, 1)
    """
    sizes = [size for size in range(2, SIZES.largest_block + 1) if chunk % size == 0 and chunk // size >= k]
    best = min(sizes, key=lambda size: chunk // size + size * k, default=1)
    return best if chunk // best + best * k < 0.7 * chunk else 1
