"""A state field in 8 bits: int8 codes, and a scale for each block of them in a field of its own."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

_LEVELS = 127
_SMALLEST = 1e-36  # a scale whose reciprocal is finite
_TOGETHER = 1 << 18  # numbers treated at a time, which a core's caches hold
Key = tuple[str, str]


class Entries(Protocol):
    """What a :class:`~commhooks.StepContext` can do with a state."""

    def read(self, name: str, field: str, /) -> torch.Tensor | None: ...

    def stage(
        self, name: str, field: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device | str, /
    ) -> torch.Tensor: ...


@dataclass(frozen=True)
class Packed:
    """How a field is held in 8 bits: ``x = code * scale``, off by at most ``max|x| / 254`` of its block.

    The field itself is int8, of the shape that it would have in fp32; ``scales`` names another field, fp32, ``(blocks,)``.
    A reduction that declares this in :attr:`Reduction.packed_fields <commhooks.Reduction.packed_fields>` reads and stages
    the field with :meth:`held` and :meth:`stage`. Whoever else looks at the state (checkpoints, figures, another hook that
    takes over) is given fp32, and a loss scale multiplies the scales alone.

    Args:
        scales: the field of the scales. It is not declared in ``fields``: it is a part of the other.
        block: numbers, in the order of memory, that share a scale.

    Example:
        >>> packed = Packed("residual_scale", block=4)
        >>> codes, scales = torch.empty(6, dtype=torch.int8), torch.empty(packed.blocks(6))
        >>> packed.pack(torch.tensor([1.0, -0.5, 0.0, 0.25, 2.54, 1.27]), codes, scales)
        >>> codes.tolist(), [round(x, 3) for x in packed.unpack(codes, scales).tolist()]
        ([127, -64, 0, 32, 127, 64], [1.0, -0.504, 0.0, 0.252, 2.54, 1.28])
    """

    scales: str
    block: int = 128

    def blocks(self, numel: int) -> int:
        """Scales of so many numbers."""
        return -(-numel // self.block)

    def pack(
        self, x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, spare: torch.Tensor | None = None
    ) -> None:
        """Fill ``codes`` int8 and ``scales`` fp32 from ``x`` fp32 of as many numbers, all contiguous.

        Of a larger field, whole blocks and the end of it may be given. ``spare``: fp32 of that many numbers, overwritten.
        """
        for numbers, there, factor in self._chunks(x.view(-1), codes.view(-1), scales):
            room = spare.view(-1)[: numbers.numel()].view(numbers.shape) if spare is not None else None
            room = torch.abs(numbers, out=room)
            torch.amax(room, 1, keepdim=True, out=factor)
            factor.mul_(1.0 / _LEVELS)
            there.copy_(torch.mul(numbers, factor.clamp(min=_SMALLEST).reciprocal_(), out=room).round_())

    def unpack(self, codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """The numbers, fp32 of the codes' shape, in ``out`` or in new memory."""
        found = out if out is not None else torch.empty(codes.shape, device=codes.device, dtype=torch.float32)
        for numbers, there, factor in self._chunks(found.view(-1), codes.view(-1), scales):
            torch.mul(there, factor, out=numbers)
        return found

    def held(self, ctx: Entries, name: str, field: str) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """A parameter's committed codes and scales, or ``None``.

        Without scales the first are no codes but numbers: of a checkpoint, or of a hook before that keeps them in fp32.
        """
        codes = ctx.read(name, field)
        if codes is None:
            return None
        return codes, ctx.read(name, self.scales) if codes.dtype == torch.int8 else None

    def stage(
        self, ctx: Entries, name: str, field: str, shape: Sequence[int], device: torch.device | str = "cpu"
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes and scales to fill: the parameter's new field once this step is committed."""
        codes = ctx.stage(name, field, shape, torch.int8, device)
        return codes, ctx.stage(name, self.scales, (self.blocks(codes.numel()),), torch.float32, device)

    def _chunks(
        self, numbers: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor
    ) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Live views of blocks ``(rows, block)`` and their scales ``(rows, 1)``; the last block may be shorter."""
        whole = numbers.numel() // self.block * self.block
        step = max(1, _TOGETHER // self.block) * self.block if numbers.device.type == "cpu" else max(whole, 1)
        cuts = [(a, min(a + step, whole), self.block) for a in range(0, whole, step)]
        if whole < numbers.numel():
            cuts.append((whole, numbers.numel(), numbers.numel() - whole))
        found = []
        for a, b, width in cuts:
            first, count = a // self.block, (b - a) // width
            shape = (count, width)
            factor = scales[first : first + count].view(-1, 1)
            found.append((numbers[a:b].view(shape), codes[a:b].view(shape), factor))
        return found


def numbers_of(store: Mapping[Key, torch.Tensor], packed: Mapping[str, Packed], key: Key) -> torch.Tensor:
    """An entry of a store, in fp32 if it is packed, else as it is. Raises KeyError if there is none."""
    found, how = store[key], packed.get(key[1])
    if how is None or found.dtype != torch.int8:
        return found
    return how.unpack(found, store[key[0], how.scales])


def unpacked(store: Mapping[Key, torch.Tensor], packed: Mapping[str, Packed]) -> Iterator[tuple[Key, torch.Tensor]]:
    """The entries of a store as :func:`numbers_of` gives them; scales are no entries of their own."""
    scales = {how.scales for how in packed.values()}
    for key in store:
        if key[1] not in scales:
            yield key, numbers_of(store, packed, key)
