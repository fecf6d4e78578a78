"""What error feedback keeps, chunk by chunk: in fp32, or in 8 bits."""

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch

from ch_quant.blocks import Chunk, gather_add, scatter, scatter_add
from commhooks import Packed


class Residuals(Protocol):
    """The residual of each vector. ``x`` is a chunk's numbers, ``(rows, block)`` fp32; ``spare`` is like it, overwritten."""

    def add_to(self, chunk: Chunk, x: torch.Tensor, spare: torch.Tensor) -> None:
        """Add what was kept to ``x``."""
        ...

    def keep(self, chunk: Chunk, x: torch.Tensor, spare: torch.Tensor) -> None:
        """Keep ``x``, and forget what was kept before."""
        ...

    def keep_more(self, chunk: Chunk, x: torch.Tensor, spare: torch.Tensor) -> None:
        """Add ``x`` to what :meth:`keep` has kept."""
        ...


class Feedback:
    """In fp32: what was kept (``None``: nothing yet), and what is to be kept, each of its vector's size."""

    def __init__(self, before: Sequence[torch.Tensor | None], after: Sequence[torch.Tensor]) -> None:
        self.before, self.after = before, after

    def add_to(self, chunk: Chunk, x: torch.Tensor, spare: torch.Tensor) -> None:
        gather_add(self.before, chunk, x)

    def keep(self, chunk: Chunk, x: torch.Tensor, spare: torch.Tensor) -> None:
        scatter(self.after, chunk, x)

    def keep_more(self, chunk: Chunk, x: torch.Tensor, spare: torch.Tensor) -> None:
        scatter_add(self.after, chunk, x)


class PackedFeedback:
    """In 8 bits: codes and scales of each vector, before (``None``: nothing yet; without scales: numbers) and after.

    The blocks of ``packed`` are those of the exchange, so that a chunk has whole ones.
    """

    def __init__(
        self,
        packed: Packed,
        before: Sequence[tuple[torch.Tensor, torch.Tensor | None] | None],
        after: Sequence[tuple[torch.Tensor, torch.Tensor]],
    ) -> None:
        self.packed, self.before, self.after = packed, before, after

    def add_to(self, chunk: Chunk, x: torch.Tensor, spare: torch.Tensor) -> None:
        for number, start, stop, place in self._pieces(chunk, x):
            kept = self.before[number]
            if kept is None:
                continue
            codes, scales = kept
            found = codes.view(-1)[start:stop]
            if scales is not None:
                found = self._numbers(found, scales, start, spare)
            place.add_(found)

    def keep(self, chunk: Chunk, x: torch.Tensor, spare: torch.Tensor) -> None:
        for number, start, stop, place in self._pieces(chunk, x):
            codes, scales = self.after[number]
            self.packed.pack(place, codes.view(-1)[start:stop], scales[start // self.packed.block :], spare)

    def keep_more(self, chunk: Chunk, x: torch.Tensor, spare: torch.Tensor) -> None:
        for number, start, stop, place in self._pieces(chunk, x):
            codes, scales = self.after[number]
            place.add_(self._numbers(codes.view(-1)[start:stop], scales, start, spare))
        self.keep(chunk, x, spare)

    def _numbers(self, codes: torch.Tensor, scales: torch.Tensor, start: int, spare: torch.Tensor) -> torch.Tensor:
        return self.packed.unpack(codes, scales[start // self.packed.block :], spare.view(-1)[: codes.numel()])

    def _pieces(self, chunk: Chunk, x: torch.Tensor) -> Iterator[tuple[int, int, int, torch.Tensor]]:
        """Vector, where in it, and the numbers, 1-D."""
        for number, start, stop, row, rows in chunk.pieces:
            yield number, start, stop, x[row : row + rows].view(-1)[: stop - start]
