"""Error feedback, chunk by chunk, with the residual in fp32, or in 8 bits.

The residual ``e`` is all that has not been sent yet. In every step a part of it is sent, :data:`RELEASED`, and the rest waits::

    p  = g + a e                     sent as C(p)
    e' = (1 - a) e + p - C(p)        = e + g - C(p)

With ``r = a e`` it is LoCo's moving average of errors, ``r' = (1 - a) r + a (p - C(p))`` (arXiv:2407.04480), which thereby loses
nothing: what has been sent and ``e`` are together what came in. With a = 1, which is plain error feedback, a step sends its
own rounding error and the one of the step before, both in full. That is twice the noise. Adam divides by the root of its
second moment, noise included, and takes steps that are too short; with a = 1/4 it is 1.14 times the noise.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch

from ch_quant.blocks import Chunk, gather_add, scatter_add, scatter_sum
from commhooks import Packed

RELEASED = 0.25  # of the residual, in a step: a power of two, so that the product is exact


class Residuals(Protocol):
    """The residual of each vector. ``x`` is a chunk's numbers, ``(rows, block)`` fp32; ``spare`` is like it, overwritten."""

    def add_to(self, chunk: Chunk, x: torch.Tensor, spare: torch.Tensor) -> None:
        """Add the part of the residual that is due to ``x``."""
        ...

    def keep(self, chunk: Chunk, x: torch.Tensor, spare: torch.Tensor) -> None:
        """Keep ``x``, what was lost, beside the part of the residual that was not due."""
        ...

    def keep_more(self, chunk: Chunk, x: torch.Tensor, spare: torch.Tensor) -> None:
        """Add ``x`` to what :meth:`keep` has kept."""
        ...


class Feedback:
    """In fp32: what was kept (``None``: nothing yet), and what is to be kept, each of its vector's size.

    Attributes:
        released: the part of each vector's residual that is sent.
    """

    def __init__(
        self,
        before: Sequence[torch.Tensor | None],
        after: Sequence[torch.Tensor],
        released: Sequence[float] | None = None,
    ) -> None:
        self.before, self.after = before, after
        self.released = released if released is not None else [RELEASED] * len(after)

    def add_to(self, chunk: Chunk, x: torch.Tensor, spare: torch.Tensor) -> None:
        gather_add(self.before, chunk, x, self.released)

    def keep(self, chunk: Chunk, x: torch.Tensor, spare: torch.Tensor) -> None:
        scatter_sum(self.after, chunk, x, self.before, [1.0 - part for part in self.released])

    def keep_more(self, chunk: Chunk, x: torch.Tensor, spare: torch.Tensor) -> None:
        scatter_add(self.after, chunk, x)


class PackedFeedback:
    """In 8 bits: codes and scales of each vector, before (``None``: nothing yet; without scales: numbers) and after.

    The blocks of ``packed`` are those of the exchange, so that a chunk has whole ones. Attributes as those of :class:`Feedback`.
    """

    def __init__(
        self,
        packed: Packed,
        before: Sequence[tuple[torch.Tensor, torch.Tensor | None] | None],
        after: Sequence[tuple[torch.Tensor, torch.Tensor]],
        released: Sequence[float],
    ) -> None:
        self.packed, self.before, self.after, self.released = packed, before, after, released

    def add_to(self, chunk: Chunk, x: torch.Tensor, spare: torch.Tensor) -> None:
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
        """Vector, where in it, and the numbers, 1-D."""
        for number, start, stop, row, rows in chunk.pieces:
            yield number, start, stop, x[row : row + rows].view(-1)[: stop - start]
