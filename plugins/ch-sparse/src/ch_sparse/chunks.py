"""Where the chunks of a bucket lie, how many entries of each are sent, and which."""

import torch

from commhooks import BucketLayout

_CACHED = 1 << 18  # elements of fp32 that stay in a core's cache between the passes over them


class Chunks:
    """A bucket's parameters in a grid of chunks, and the entries that are chosen from each.

    Each parameter starts a chunk of its own, so that results do not depend on the buckets. A chunk of n elements has
    ``max(1, round(density * n))`` entries, the last of a parameter, which may be shorter, fewer than the others.

    Args:
        layout: of the bucket.
        chunk: elements of a chunk.
        density: part of them that is chosen.

    Attributes:
        rows: chunks.
        k: entries of a whole chunk, the columns of what :func:`largest` gives.
        total: entries of all chunks.
        counts: entries of each chunk, ``(rows, 1)`` fp32.
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
        """The chunks of each parameter, as one row, of ``grid`` ``(rows, chunk)``."""
        return [rows.view(-1) for rows in grid.split(self.sizes)]

    def entries(self, columns: torch.Tensor) -> torch.Tensor:
        """Those of ``columns`` ``(rows, k)`` that are sent, ``(total,)``: a short chunk's are the first of its row."""
        flat = columns.view(-1)
        return flat if self._kept is None else flat[self._kept]

    def positions(self, indices: torch.Tensor) -> torch.Tensor:
        """Where in the flat grid entries ``(total,)`` lie whose places in their chunks are ``indices``."""
        return self._base + indices


def largest(grid: torch.Tensor, k: int) -> torch.Tensor:
    """Columns of the ``k`` largest magnitudes of every row, largest first: ``(rows, k)`` int64. NaN is the largest.

    A CPU is given as much at a time as its cache holds: of memory, the passes would cost as much as the choice.

    >>> largest(torch.tensor([[1.0, -5.0, 0.0, 2.0]]), 2)
    tensor([[1, 3]])
    """
    if grid.device.type != "cpu":
        return _largest(grid, k)
    return torch.cat([_largest(rows, k) for rows in grid.split(max(1, _CACHED // grid.shape[1]))])


def _largest(grid: torch.Tensor, k: int) -> torch.Tensor:
    """The k largest of a row lie in the k blocks of it whose largest are the largest: those are searched alone, for
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
    """Elements of a block, a divisor of ``chunk``, such that ``topk`` sees the fewest elements; 1 where none saves much.

    >>> _block(4096, 41), _block(4096, 2048), _block(4093, 41)
    (8, 1, 1)
    """
    sizes = [size for size in range(2, 65) if chunk % size == 0 and chunk // size >= k]
    best = min(sizes, key=lambda size: chunk // size + size * k, default=1)
    return best if chunk // best + best * k < 0.7 * chunk else 1
