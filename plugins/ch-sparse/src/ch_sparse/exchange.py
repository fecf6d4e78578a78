"""The messages of one bucket: chosen entries, packed, gathered from all ranks, and unpacked."""

from collections.abc import Iterator

import torch

from ch_sparse.bits import BitPacking
from ch_sparse.chunks import Chunks
from ch_sparse.values import Values
from commhooks import AllGather, StepContext


class Exchange:
    """A bucket's entries on their way to all ranks.

    A rank's message is the values' part, then the places, packed, then at most one byte, so that every rank's part of what is
    gathered begins where bf16 may. Values in fp32 are a message of their own, which a 16-bit wrapper may round.

    Args:
        chunks: where the entries lie.
        values: how they travel; ``None`` for fp32.
        places: how their places in the chunks do.
        ctx: of the step.
        device: of the bucket.
    """

    def __init__(
        self, chunks: Chunks, values: Values | None, places: BitPacking, ctx: StepContext, device: torch.device
    ) -> None:
        self.chunks, self.values, self.places = chunks, values, places
        self.split = values.bytes(chunks) if values is not None else 0  # where the places begin
        self.end = self.split + places.bytes(chunks.total)
        size = self.end + self.end % 2
        self.mine = ctx.scratch("mine", (size,), torch.uint8, device)
        self.everyone = ctx.scratch("everyone", (ctx.world_size, size), torch.uint8, device)
        if values is None:
            self.exact, self.rounded = (
                ctx.scratch(name, (chunks.total,), device=device) for name in ("exact", "rounded")
            )
            self.received = ctx.scratch("received", (ctx.world_size, chunks.total), device=device)

    def requests(self, chosen: torch.Tensor, columns: torch.Tensor) -> tuple[AllGather, ...]:
        """What is to be sent: values and their columns in the grid, ``(rows, k)`` each, the largest of a row first."""
        self.mine[self.end :].zero_()
        self.places.pack(self.chunks.entries(columns), self.mine[self.split : self.end])
        packed = AllGather(self.mine, self.everyone.view(-1))
        if self.values is not None:
            self.values.encode(chosen, self.chunks, self.mine[: self.split])
            return (packed,)
        self.exact.copy_(self.chunks.entries(chosen))
        return packed, AllGather(self.exact, self.received.view(-1), castable=True, sent=self.rounded)

    def own(self) -> torch.Tensor:
        """This rank's values as the others receive them, ``(total,)`` fp32. Once they have been sent."""
        return self.values.decode(self.mine[: self.split], self.chunks) if self.values is not None else self.rounded

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Of each rank, in order: where in the flat grid its entries lie, int64, and their values, fp32, ``(total,)``."""
        for rank, message in enumerate(self.everyone):
            columns = self.places.unpack(message[self.split : self.end], self.chunks.total)
            values = self.values.decode(message[: self.split], self.chunks) if self.values else self.received[rank]
            yield self.chunks.positions(columns), values
