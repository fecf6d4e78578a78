"""Error feedback, chunk by chunk, with a residual in fp32 or in 8 bits.

The residual ``e`` is the sum of all numbers that were not sent yet. Every step sends the share :data:`RELEASED` of it::

    p  = g + a e                     sent as C(p)
    e' = (1 - a) e + p - C(p)        = e + g - C(p)

With ``r = a e`` this is LoCo's moving average of errors, ``r' = (1 - a) r + a (p - C(p))`` (arXiv:2407.04480), and it loses
nothing: sent numbers plus ``e`` equal the gradients. Plain error feedback (a = 1) sends its own rounding error and the previous
one in full, which is twice the noise. Adam divides by the root of its second moment, noise included, and takes steps that are
too short. With a = 1/4 the noise is 1.14 times that of one rounding.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch

from ch_quant.blocks import Chunk, gather, scatter_add, scatter_sum
from commhooks import Packed

RELEASED = 0.25  # share of the residual sent in a step; the product with a power of two is exact


class Residuals(Protocol):
    """The residual of each vector. ``x`` holds a chunk, ``(rows, block)`` fp32; ``spare`` has its shape and is overwritten."""

    def gather(self, vectors: Sequence[torch.Tensor], chunk: Chunk, x: torch.Tensor, spare: torch.Tensor) -> None:
        """Write the numbers of the vectors plus the due share of the residual to ``x``."""
        ...

    def keep(self, chunk: Chunk, x: torch.Tensor, spare: torch.Tensor) -> None:
        """Keep the error ``x`` plus the share of the residual that was not due."""
        ...

    def keep_more(self, chunk: Chunk, x: torch.Tensor, spare: torch.Tensor) -> None:
        """Add ``x`` to the residual that :meth:`keep` has written."""
        ...


class Feedback:
    """Residuals in fp32, before (``None`` if there are none) and after the step, each of its vector's size.

    Attributes:
        released: share of each vector's residual that the step sends.
    """

    def __init__(
        self,
        before: Sequence[torch.Tensor | None],
        after: Sequence[torch.Tensor],
        released: Sequence[float] | None = None,
    ) -> None:
        self.before, self.after = before, after
        self.released = released if released is not None else [RELEASED] * len(after)

    def gather(self, vectors: Sequence[torch.Tensor], chunk: Chunk, x: torch.Tensor, spare: torch.Tensor) -> None:
        gather(vectors, chunk, x, self.before, self.released)

    def keep(self, chunk: Chunk, x: torch.Tensor, spare: torch.Tensor) -> None:
        scatter_sum(self.after, chunk, x, self.before, [1.0 - part for part in self.released])

    def keep_more(self, chunk: Chunk, x: torch.Tensor, spare: torch.Tensor) -> None:
        scatter_add(self.after, chunk, x)


class PackedFeedback:
    """Residuals in 8 bits, as codes and scales of each vector, before and after the step.

    ``None`` before means no residual, codes without scales are plain numbers.

    ``packed`` has the blocks of the exchange, so a chunk has whole blocks. Attributes as in :class:`Feedback`.
    """

    def __init__(
        self,
        packed: Packed,
        before: Sequence[tuple[torch.Tensor, torch.Tensor | None] | None],
        after: Sequence[tuple[torch.Tensor, torch.Tensor]],
        released: Sequence[float],
    ) -> None:
        self.packed, self.before, self.after, self.released = packed, before, after, released

    def gather(self, vectors: Sequence[torch.Tensor], chunk: Chunk, x: torch.Tensor, spare: torch.Tensor) -> None:
        gather(vectors, chunk, x)
        for number, start, stop, place in self._pieces(chunk, x):
            self._add_kept(place, number, start, stop, self.released[number], spare)

    def keep(self, chunk: Chunk, x: torch.Tensor, spare: torch.Tensor) -> None:
        for number, start, stop, place in self._pieces(chunk, x):
            self._add_kept(place, number, start, stop, 1.0 - self.released[number], spare)
            self._pack(place, number, start, stop, spare)

    def keep_more(self, chunk: Chunk, x: torch.Tensor, spare: torch.Tensor) -> None:
        for number, start, stop, place in self._pieces(chunk, x):
            codes, scales = self.after[number]
            place.add_(self._numbers(codes.view(-1)[start:stop], scales, start, spare))
            self._pack(place, number, start, stop, spare)

    def _add_kept(
        self, place: torch.Tensor, number: int, start: int, stop: int, part: float, spare: torch.Tensor
    ) -> None:
        kept = self.before[number]
        if kept is None:
            return
        codes, scales = kept
        found = codes.view(-1)[start:stop]
        place.add_(found if scales is None else self._numbers(found, scales, start, spare), alpha=part)

    def _pack(self, place: torch.Tensor, number: int, start: int, stop: int, spare: torch.Tensor) -> None:
        codes, scales = self.after[number]
        self.packed.pack(place, codes.view(-1)[start:stop], scales[start // self.packed.block :], spare)

    def _numbers(self, codes: torch.Tensor, scales: torch.Tensor, start: int, spare: torch.Tensor) -> torch.Tensor:
        return self.packed.unpack(codes, scales[start // self.packed.block :], spare.view(-1)[: codes.numel()])

    def _pieces(self, chunk: Chunk, x: torch.Tensor) -> Iterator[tuple[int, int, int, torch.Tensor]]:
        """Yield vector number, start and stop in the vector, and the numbers, 1-D."""
        for number, start, stop, row, rows in chunk.pieces:
            yield number, start, stop, x[row : row + rows].view(-1)[: stop - start]
