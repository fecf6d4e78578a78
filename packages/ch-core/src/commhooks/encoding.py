"""Encodings of state entries: the order of their numbers, and 8-bit codes with a scale for each block."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

import torch

from commhooks.bucket import ParamLayout, contiguous_stride
from commhooks.device import record_use
from commhooks.sizes import SIZES

_LEVELS = 127
_SMALLEST = 1e-36  # a scale whose reciprocal is finite
Key = tuple[str, str]
"""Parameter name and field of an entry."""
_EMPTY: Mapping[Any, Any] = MappingProxyType({})


class FieldAccess(Protocol):
    """Reads and stages entries, as :class:`~commhooks.StepContext` does."""

    def read(self, name: str, field: str, /) -> torch.Tensor | None: ...

    def stage(
        self, name: str, field: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device | str, /
    ) -> torch.Tensor: ...


@dataclass(frozen=True)
class Packed:
    """Format of a field in 8 bits: ``x = code * scale``, off by at most ``max|x| / 254`` of its block.

    The field is int8 and has the shape that it would have in fp32. ``scales`` names a second field, fp32, ``(blocks,)``. A
    reduction declares this in :attr:`Reduction.packed_fields <commhooks.Reduction.packed_fields>`, and reads and stages the
    field with :meth:`held` and :meth:`stage`. Checkpoints, reports and other hooks read fp32. A loss scale multiplies the
    scales alone.

    Args:
        scales: name of the second field. It belongs to the first field, and is not declared in ``fields``.
        block: numbers that share a scale, in the order of memory.

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
        """Return the number of scales for ``numel`` numbers."""
        return -(-numel // self.block)

    def pack(
        self, x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, spare: torch.Tensor | None = None
    ) -> None:
        """Fill ``codes`` (int8) and ``scales`` (fp32) from ``x`` (fp32), all contiguous.

        They may be a run of whole blocks of a larger field, or its end. ``spare`` is fp32 of the same size, overwritten.
        """
        for numbers, there, factor in self._chunks(x.view(-1), codes.view(-1), scales):
            room = spare.view(-1)[: numbers.numel()].view(numbers.shape) if spare is not None else None
            room = torch.abs(numbers, out=room)
            torch.amax(room, 1, keepdim=True, out=factor)
            factor.mul_(1.0 / _LEVELS)
            there.copy_(torch.mul(numbers, factor.clamp(min=_SMALLEST).reciprocal_(), out=room).round_())

    def unpack(self, codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return the numbers, fp32 of the codes' shape, in ``out`` or in new memory."""
        found = out if out is not None else torch.empty(codes.shape, device=codes.device, dtype=torch.float32)
        for numbers, there, factor in self._chunks(found.view(-1), codes.view(-1), scales):
            torch.mul(there, factor, out=numbers)
        return found

    def held(self, ctx: FieldAccess, name: str, field: str) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """Return a parameter's committed codes and scales, or ``None``.

        Without scales the first tensor holds numbers: from a checkpoint, or from another hook.
        """
        codes = ctx.read(name, field)
        if codes is None:
            return None
        return codes, ctx.read(name, self.scales) if codes.dtype == torch.int8 else None

    def stage(
        self, ctx: FieldAccess, name: str, field: str, shape: Sequence[int], device: torch.device | str = "cpu"
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return codes and scales to fill. They become the parameter's field when the step commits."""
        codes = ctx.stage(name, field, shape, torch.int8, device)
        return codes, ctx.stage(name, self.scales, (self.blocks(codes.numel()),), torch.float32, device)

    def _chunks(
        self, numbers: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor
    ) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Return live views of blocks ``(rows, block)`` and their scales ``(rows, 1)``. The last block may be shorter."""
        whole = numbers.numel() // self.block * self.block
        step = (
            max(1, SIZES.packed_elements // self.block) * self.block if numbers.device.type == "cpu" else max(whole, 1)
        )
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


@dataclass(frozen=True)
class Encoding:
    """Format in which an entry of state holds the numbers of a parameter.

    Every entry carries one. A reader that expects another encoding receives converted numbers, so that a hook never takes
    codes for numbers, or one order for another.

    Attributes:
        memory: layout of the parameter if the entry lies in the order of the parameter's memory, in its ``matrix_shape``.
            ``None`` if the entry has the parameter's own shape and order.
        packed: format of the codes if an int8 entry holds codes.
        part: first and last element (excluded) if the entry holds only a part of the parameter in the order of its memory.
            Its other elements are zeros.

    Example:
        >>> turned = ParamLayout("w", (2, 3), (1, 2), 0)  # stored as (3, 2)
        >>> Encoding.of(turned, in_memory=True).decode(torch.tensor([[0, 3], [1, 4], [2, 5]]))
        tensor([[0, 1, 2],
                [3, 4, 5]])
    """

    memory: ParamLayout | None = None
    packed: Packed | None = None
    part: tuple[int, int] | None = None

    @staticmethod
    def of(param: ParamLayout, *, in_memory: bool = False, packed: Packed | None = None) -> "Encoding":
        """Return the encoding of a field of ``param``; encodings of one shape and stride are equal."""
        return Encoding(ParamLayout("", param.shape, param.stride, 0) if in_memory else None, packed)

    def numbers(self, tensor: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
        """Return the numbers of an entry in the entry's own order; fp32 if it holds codes."""
        if self.packed is None or scales is None or tensor.dtype != torch.int8:
            return tensor
        return self.packed.unpack(tensor, scales)

    def decode(self, tensor: torch.Tensor, scales: torch.Tensor | None = None) -> torch.Tensor:
        """Return the numbers of an entry in the parameter's shape and order. An entry of another
        shape stays unchanged.
        """
        numbers, memory = self.numbers(tensor, scales), self.memory
        if memory is not None and self.part is not None:
            start, stop = self.part
            whole = numbers.new_zeros(memory.numel)
            whole[start:stop] = numbers.reshape(-1)
            numbers = whole
        if memory is None or not _belongs(numbers, memory):
            return numbers
        if memory.stride == contiguous_stride(memory.shape):
            return numbers.reshape(memory.shape)
        return memory.to_own_shape(numbers)

    def encode(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return numbers of the parameter's own order as this encoding orders them. They stay unpacked."""
        if self.memory is None or not _belongs(numbers, self.memory):
            return numbers
        ordered = self.memory.to_memory_order(numbers)
        return ordered if self.part is None else ordered.view(-1)[slice(*self.part)]


def _belongs(numbers: torch.Tensor, memory: ParamLayout) -> bool:
    """Return True if an entry has the shape of a parameter, or is flat. Another shape of equal size stays, to be refused."""
    return tuple(numbers.shape) in {memory.shape, memory.matrix_shape, (memory.numel,)}


OWN_ORDER = Encoding()


class Entries(dict[Key, torch.Tensor]):
    """Tensors of a state by ``(parameter name, field)``, and the encoding of each.

    Attributes:
        encodings: encoding by key. An entry without one has the encoding of its first reader.
    """

    def __init__(
        self, tensors: Mapping[Key, torch.Tensor] = _EMPTY, encodings: Mapping[Key, Encoding] = _EMPTY
    ) -> None:
        super().__init__(tensors)
        self.encodings = dict(encodings)

    @staticmethod
    def of(tensors: Mapping[Key, torch.Tensor]) -> "Entries":
        """Return ``tensors``, or a copy of a plain mapping, which a pickle of version 0.1.0 has."""
        return tensors if isinstance(tensors, Entries) else Entries(tensors)

    def copy(self) -> "Entries":
        """Return the same tensors in another mapping."""
        return Entries(self, self.encodings)

    def numbers(self, key: Key) -> torch.Tensor:
        """Return an entry unpacked, in its own order. Raises KeyError if there is none."""
        encoding = self.encodings.get(key, OWN_ORDER)
        return encoding.numbers(self[key], self._scales(key, encoding))

    def decoded(self) -> Iterator[tuple[Key, torch.Tensor]]:
        """Yield each entry unpacked, in the parameter's own shape and order. Scales do not count as entries."""
        parts = self.scale_fields()
        for key in sorted(self):
            if key not in parts:
                encoding = self.encodings.get(key, OWN_ORDER)
                yield key, encoding.decode(self[key], self._scales(key, encoding))

    def scale_fields(self) -> dict[Key, str]:
        """Return the keys of scales, and the field of the codes that each belongs to."""
        pairs = [(key, encoding.packed) for key, encoding in self.encodings.items() if key in self]
        return {(name, packed.scales): field for (name, field), packed in pairs if packed is not None}

    def read_as(self, wanted: Mapping[Key, Encoding]) -> bool:
        """Convert the entries that are encoded otherwise; returns True if there were any.

        An entry that already has an encoding keeps its numbers. Converted tensors are new, because a snapshot may hold
        the old ones.
        """
        found = False
        for key, encoding in wanted.items():
            present = self.encodings.get(key)
            if present is not None and present != encoding:
                found = True
                if key in self:
                    codes, scales = self[key], self._scales(key, present)
                    self[key] = encoding.encode(present.decode(codes, scales)).clone()
                    for old in (codes,) if scales is None else (codes, scales):
                        record_use(old)  # it is freed now, and this stream still reads it
                if present.packed is not None:
                    self.pop((key[0], present.packed.scales), None)
            self.encodings[key] = encoding
        return found

    def drop(self, key: Key) -> None:
        """Remove an entry together with its scales, which would otherwise pass for an entry of their own."""
        packed = self.encodings.get(key, OWN_ORDER).packed
        if packed is not None:
            self.pop((key[0], packed.scales), None)
        del self[key]

    def rename(self, names: Mapping[str, str]) -> None:
        """Give parameters other names."""
        for store in (self, self.encodings):
            moved = {(names.get(name, name), field): value for (name, field), value in store.items()}
            store.clear()
            store.update(moved)  # type: ignore[arg-type]

    def _scales(self, key: Key, encoding: Encoding) -> torch.Tensor | None:
        return self.get((key[0], encoding.packed.scales)) if encoding.packed is not None else None
