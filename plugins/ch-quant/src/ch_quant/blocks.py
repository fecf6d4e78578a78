"""Layout of vectors in rows of blocks. Each vector starts a new block, and several ranks own equal parts of the rows.

A *piece* is a run of one vector's numbers in a chunk of a part. The layout follows from sizes alone and is cached.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch


class Piece(NamedTuple):
    """Numbers ``start`` to ``stop`` of vector ``number``, in a chunk's ``rows`` blocks from ``row``, padded with zeros."""

    number: int
    start: int
    stop: int
    row: int
    rows: int


class Chunk(NamedTuple):
    """Blocks ``first`` to ``first + rows`` of a part; blocks from ``used`` are zero."""

    first: int
    rows: int
    used: int
    pieces: tuple[Piece, ...]


class Cut(NamedTuple):
    """Vectors as blocks, cut into equal parts of ``rows`` blocks."""

    rows: int
    parts: tuple[tuple[Chunk, ...], ...]


@lru_cache(maxsize=1024)
def cut(sizes: tuple[int, ...], block: int, parts: int, chunk: int) -> Cut:
    """Cut vectors of these sizes into ``parts`` equal parts, and each into chunks of at most ``chunk`` blocks.

    A chunk of at least half that size ends where a vector ends. The numbers of one vector need no copy (:func:`whole`).

    Example:
        >>> cut((40, 16), 16, 2, 100).rows  # 3 blocks and 1
        2
        >>> [[piece[:3] for piece in chunks[0].pieces] for chunks in cut((40, 16), 16, 2, 100).parts]
        [[(0, 0, 32)], [(0, 32, 40), (1, 0, 16)]]
        >>> [(chunk.first, chunk.rows) for chunk in cut((16, 112, 48), 16, 1, 4).parts[0]]
        [(0, 4), (4, 4), (8, 3)]
    """
    ends = list(accumulate(-(-size // block) for size in sizes))  # of each vector, in blocks
    rows = -(-(ends[-1] if ends else 0) // parts)
    return Cut(
        rows,
        tuple(
            tuple(
                _chunk(sizes, ends, block, part * rows, first, last - first)
                for first, last in pairwise(_edges([end - part * rows for end in ends], rows, chunk))
            )
            for part in range(parts)
        ),
    )


def _edges(ends: list[int], rows: int, chunk: int) -> list[int]:
    """Return the first block of each chunk of a part, and ``rows``. Vectors end at ``ends``."""
    edges = [0]
    for end in (*(end for end in ends if 0 < end < rows), rows):
        size = end - edges[-1]
        if 2 * size >= chunk or end == rows:
            count = -(-size // chunk)
            edges += [end - size * left // count for left in range(count - 1, -1, -1)]
    return edges


def _chunk(sizes: tuple[int, ...], ends: list[int], block: int, offset: int, first: int, rows: int) -> Chunk:
    begin, end = offset + first, offset + first + rows
    pieces, used = [], 0
    for number, (size, stop) in enumerate(zip(sizes, ends, strict=True)):
        start = stop - -(-size // block)
        a, b = max(begin, start), min(end, stop)
        if a < b:
            pieces.append(Piece(number, (a - start) * block, min((b - start) * block, size), a - begin, b - a))
            used = b - begin
    return Chunk(first, rows, used, tuple(pieces))


def whole(vectors: Sequence[torch.Tensor], chunk: Chunk, block: int) -> torch.Tensor | None:
    """Return a view of a chunk, ``(rows, block)``, if one fp32 vector holds all of it, else ``None``."""
    if len(chunk.pieces) != 1:
        return None
    number, start, stop, _, rows = chunk.pieces[0]
    if stop - start != chunk.rows * block or rows != chunk.rows or vectors[number].dtype != torch.float32:
        return None
    return vectors[number][start:stop].view(rows, block)


def gather(
    vectors: Sequence[torch.Tensor],
    chunk: Chunk,
    out: torch.Tensor,
    others: Sequence[torch.Tensor | None] = (),
    factors: Sequence[float] = (),
) -> None:
    """Copy the numbers of a chunk to ``out`` ``(rows, block)``, and fill the rest with zeros.

    Args:
        vectors: have the numbers.
        chunk: their places.
        out: receives them.
        others: added to the vectors; ``None`` stands for zeros. They may be shorter than a vector.
        factors: of the other vectors.
    """
    for number, start, stop, row, rows in chunk.pieces:
        place = out[row : row + rows].view(-1)
        if len(place) > stop - start:
            place[stop - start :].zero_()
            place = place[: stop - start]
        numbers, other = vectors[number][start:stop], others[number] if others else None
        if other is None:
            place.copy_(numbers)
            continue
        other = other[start:stop]
        if len(other) < len(place):
            place.copy_(numbers)
        torch.add(numbers[: len(other)], other, alpha=factors[number], out=place[: len(other)])
    if chunk.used < chunk.rows:
        out[chunk.used :].zero_()


def scatter(vectors: Sequence[torch.Tensor], chunk: Chunk, x: torch.Tensor) -> None:
    """Copy the numbers of a chunk to the vectors, without padding."""
    for number, start, stop, row, rows in chunk.pieces:
        place = vectors[number][start:stop]
        place.copy_(x[row : row + rows].view(-1)[: place.numel()])


def scatter_add(vectors: Sequence[torch.Tensor], chunk: Chunk, x: torch.Tensor) -> None:
    """Add the numbers of a chunk to the vectors."""
    for number, start, stop, row, rows in chunk.pieces:
        vectors[number][start:stop].add_(x[row : row + rows].view(-1)[: stop - start])


def scatter_sum(
    vectors: Sequence[torch.Tensor],
    chunk: Chunk,
    x: torch.Tensor,
    others: Sequence[torch.Tensor | None],
    factors: Sequence[float],
) -> None:
    """Write the numbers of a chunk plus each vector's factor times another vector; ``None`` stands for zeros."""
    for number, start, stop, row, rows in chunk.pieces:
        place, other = vectors[number][start:stop], others[number]
        numbers = x[row : row + rows].view(-1)[: place.numel()]
        if other is None:
            place.copy_(numbers)
        else:
            torch.add(numbers, other[start:stop], alpha=factors[number], out=place)
