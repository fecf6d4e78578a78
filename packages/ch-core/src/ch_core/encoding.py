"""Entries of a state: numbers and their encoding, which is an order, and 8-bit codes with a scale for each block."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ch_core.bucket import ParamLayout, contiguous_stride
from ch_core.device import record_use
from ch_core.sizes import SIZES

_LEVELS = 127
_SMALLEST = 1e-36  # a scale whose reciprocal is finite
Key = tuple[str, str]
"""Parameter name and field of an entry."""


@dataclass(frozen=True)
class Packed:
    """Format of a field in 8 bits: ``x = code * scale``, off by at most ``max|x| / 254`` of its block.

    The codes are int8 and have the shape that the field would have in fp32. The scales are fp32, ``(blocks,)``. A reduction
    declares this in :attr:`Reduction.packed_fields <ch_core.Reduction.packed_fields>`, and uses the field with
    :meth:`.StepContext.read_packed` and :meth:`.StepContext.write_packed`. Checkpoints, reports and other hooks read fp32. A
    loss scale multiplies the scales alone.

    Args:
        block: numbers that share a scale, in the order of memory.

    Example:
        >>> packed = Packed(block=4)
        >>> codes, scales = torch.empty(6, dtype=torch.int8), torch.empty(packed.blocks(6))
        >>> packed.pack(torch.tensor([1.0, -0.5, 0.0, 0.25, 2.54, 1.27]), codes, scales)
        >>> codes.tolist(), [round(x, 3) for x in packed.unpack(codes, scales).tolist()]
        ([127, -64, 0, 32, 127, 64], [1.0, -0.504, 0.0, 0.252, 2.54, 1.28])
    """

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

    Every :class:`Entry` carries one. A reader that expects another encoding receives converted numbers, so that a hook never
    takes codes for numbers, or one order for another.

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

    def scales(self, tensor: torch.Tensor) -> int | None:
        """Return the number of scales of a tensor in this encoding; ``None`` if it holds no codes."""
        return self.packed.blocks(tensor.numel()) if self.packed is not None and tensor.dtype == torch.int8 else None

    def decode(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return unpacked numbers in the parameter's shape and order. Numbers of another shape stay unchanged."""
        memory = self.memory
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


@dataclass(slots=True, eq=False)
class Entry:
    """Numbers of one field of one parameter, and their encoding.

    Attributes:
        tensor: the numbers, or their int8 codes.
        encoding: format of the numbers.
        scales: scales of the codes; ``None`` if ``tensor`` holds numbers.
        is_error: True in a draft if the numbers are an error, which is added to the residual that the draft found.

    Example:
        >>> turned = Encoding(ParamLayout("", (2, 3), (1, 2), 0))
        >>> entry = Entry(torch.tensor([[0, 3], [1, 4], [2, 5]]), turned)
        >>> entry.convert(OWN_ORDER)
        >>> entry.tensor
        tensor([[0, 1, 2],
                [3, 4, 5]])
    """

    tensor: torch.Tensor
    encoding: Encoding = OWN_ORDER
    scales: torch.Tensor | None = None
    is_error: bool = False

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The tensors that hold the entry."""
        return (self.tensor,) if self.scales is None else (self.tensor, self.scales)

    def fits(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> bool:
        """Return True if numbers or codes of this shape fit into the tensor."""
        found = self.tensor
        return found.shape == tuple(shape) and found.dtype == dtype and found.device == device

    def numbers(self) -> torch.Tensor:
        """Return the numbers in the entry's own order; fp32 if it holds codes."""
        packed, scales = self.encoding.packed, self.scales
        return self.tensor if packed is None or scales is None else packed.unpack(self.tensor, scales)

    def decoded(self) -> torch.Tensor:
        """Return the numbers in the parameter's shape and order."""
        return self.encoding.decode(self.numbers())

    def convert(self, wanted: Encoding) -> None:
        """Hold the numbers in another encoding, unpacked. The tensor is new, because a reader may still have the old one."""
        if self.encoding != wanted:
            old = self.tensors
            self.tensor, self.scales = wanted.encode(self.decoded()).clone(), None
            self.encoding = wanted
            for tensor in old:
                record_use(tensor)  # it is freed now, and this stream still reads it

    def add(self, other: "Entry") -> None:
        """Add the numbers of another entry in place, unless it has another size."""
        if other.tensor.numel() != self.tensor.numel():
            return
        numbers = other.numbers() if other.encoding == self.encoding else self.encoding.encode(other.decoded())
        packed, scales = self.encoding.packed, self.scales
        if packed is not None and scales is not None:
            packed.pack(self.numbers().add_(numbers.view(self.tensor.shape)), self.tensor, scales)
        else:
            self.tensor.add_(numbers.view(self.tensor.shape))

    def to(self, device: torch.device) -> None:
        """Move the entry to a device."""
        self.tensor = self.tensor.to(device)
        self.scales = self.scales.to(device) if self.scales is not None else None
