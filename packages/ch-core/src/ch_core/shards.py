"""Gradients that the ranks share out (a reduce-scatter), and parameters that they gather.

FSDP cuts every parameter into W chunks along a dimension and pads them to the size of the first chunk. Part r holds chunk r of
every parameter, and belongs to rank r. All parts have the same layout; only their padding differs.
"""

import itertools
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from ch_core.bucket import BucketLayout, ParamLayout, contiguous_stride
from ch_core.requests import AllGather, ReduceScatter, Requests


class ShardLayout:
    """Division of parameters into W parts. It is the same on every rank, and holds no numbers.

    Args:
        part: names, padded shapes and offsets of one part. The names are the parameters' own.
        whole: name -> shape of the whole parameter.
        dims: name -> the dimension that is cut; 0 if absent. Along another dimension the chunks are equal.

    Attributes:
        part, whole, dims: the arguments.
    """

    __slots__ = ("_whole", "dims", "part", "whole")

    def __init__(
        self, part: BucketLayout, whole: Mapping[str, tuple[int, ...]], dims: Mapping[str, int] | None = None
    ) -> None:
        self.part, self.whole, self.dims = part, dict(whole), dict(dims or {})
        self._whole = {n: ParamLayout(n, shape, contiguous_stride(shape), 0) for n, shape in self.whole.items()}

    @staticmethod
    def of(layout: BucketLayout, world_size: int) -> "ShardLayout":
        """Cut the parameters of ``layout`` along dimension 0, as FSDP2 does.

        >>> cut = ShardLayout.of(BucketLayout.of_shapes({"w": (5, 2), "b": (3,)}), 2)
        >>> [(p.name, p.shape, p.offset) for p in cut.part.params], cut.bucket(2).numel
        ([('w', (3, 2), 0), ('b', (2,), 6)], 16)
        """
        whole = {p.name: p.shape or (1,) for p in layout.params}
        shapes = {name: (-(-shape[0] // world_size), *shape[1:]) for name, shape in whole.items()}
        return ShardLayout(BucketLayout.of_shapes(shapes, layout.dtype, layout.device), whole)

    def bucket(self, world_size: int) -> BucketLayout:
        """Return all parts as one bucket, which is a rank's input to the reduce-scatter."""
        part = self.part
        params = [
            ParamLayout(p.name, p.shape, p.stride, r * part.numel + p.offset)
            for r in range(world_size)
            for p in part.params
        ]
        return BucketLayout(params, world_size * part.numel, part.dtype, part.device)

    def select(self, names: frozenset[str]) -> "ShardLayout":
        """Return the layout of some of the parameters, in the same places."""
        return ShardLayout(self.part.select(names), self.whole, self.dims)

    def whole_param(self, name: str) -> ParamLayout:
        """Return the whole parameter, row-major."""
        return self._whole[name]


@dataclass(slots=True)
class Parts:
    """W parts of some parameters in one tensor, ``storage`` ``(W * n,)``. The base of :class:`Shards` and :class:`Weights`."""

    layout: ShardLayout
    storage: torch.Tensor

    @property
    def params(self) -> tuple[ParamLayout, ...]:
        """Parameters of one part: padded shapes, and offsets in the part."""
        return self.layout.part.params

    @property
    def device(self) -> torch.device:
        return self.storage.device

    @property
    def world_size(self) -> int:
        """Number of parts."""
        return self.storage.numel() // max(self.layout.part.numel, 1)

    def vectors(self) -> list[list[torch.Tensor]]:
        """Return each part's parameters as live 1-D views with padding. Sizes are the same in every part."""
        return [self._split(part) for part in self.storage.view(self.world_size, -1)]

    def whole(self, param: ParamLayout) -> ParamLayout:
        """Return the whole parameter that ``param`` is a chunk of. State has its shape on every rank, for any W."""
        return self.layout.whole_param(param.name)

    def cut(self, param: ParamLayout, kept: torch.Tensor) -> list[torch.Tensor]:
        """Cut a tensor of the whole parameter's size into W vectors that match :meth:`vectors`, without padding.

        The last ones are shorter or empty. They are views if dimension 0 is cut, else copies.
        """
        dim, whole = self.layout.dims.get(param.name, 0), self.whole(param)
        if dim == 0:
            flat, size = kept.view(-1), param.numel
            bounds = [min(r * size, flat.numel()) for r in range(self.world_size + 1)]
            return [flat[a:b] for a, b in itertools.pairwise(bounds)]
        return [c.contiguous().view(-1) for c in kept.view(whole.shape).chunk(self.world_size, dim)]

    def join(self, param: ParamLayout, pieces: Sequence[torch.Tensor], kept: torch.Tensor) -> None:
        """Write the vectors of :meth:`cut` back into ``kept`` if they are copies."""
        dim = self.layout.dims.get(param.name, 0)
        if dim:
            chunks = kept.view(self.whole(param).shape).chunk(self.world_size, dim)
            for chunk, piece in zip(chunks, pieces, strict=True):
                chunk.copy_(piece.view(chunk.shape))

    def _split(self, part: torch.Tensor) -> list[torch.Tensor]:
        return [part[p.offset : p.offset + p.numel] for p in self.params]


@dataclass(slots=True)
class Shards(Parts):
    """W parts of a gradient, and the place for the average of one.

    Attributes:
        layout: division of the parameters into parts.
        storage: ``(W * n,)``: this rank's gradient, part r for rank r, zeros in the padding. May be overwritten.
        output: ``(n,)``: this rank's part of the average when the reduction has ended. Its padding is ignored.
        index: position in the step, equal on all ranks.

    Example:
        >>> cut = ShardLayout.of(BucketLayout.of_shapes({"w": (3, 2)}), 2)
        >>> shards = Shards(cut, torch.arange(8.0), torch.zeros(4))
        >>> [[v.tolist() for v in part] for part in shards.vectors()]
        [[[0.0, 1.0, 2.0, 3.0]], [[4.0, 5.0, 6.0, 7.0]]]
        >>> [piece.tolist() for piece in shards.cut(shards.params[0], torch.arange(6.0))]
        [[0.0, 1.0, 2.0, 3.0], [4.0, 5.0]]
    """

    output: torch.Tensor
    index: int = 0

    def own(self) -> list[torch.Tensor]:
        """Return the places for this rank's averages: live 1-D views of :attr:`output`, of the same sizes."""
        return self._split(self.output)

    def select(self, names: Iterable[str]) -> "Shards":
        """Return some of the parameters, over the same memory."""
        return Shards(self.layout.select(frozenset(names)), self.storage, self.output, self.index)


@dataclass(slots=True)
class Weights(Parts):
    """This rank's shards of some parameters, and memory for the shards of all ranks.

    Attributes:
        layout: division of the parameters into parts.
        storage: ``(W * n,)``. At first part ``rank`` holds this rank's exact shards, zeros in the padding, and the other parts
            hold nothing. When the reduction has ended, every part holds the weights that all ranks compute with, equal on
            every rank. Its padding is ignored.
        rank: this rank in the group.
        index: position in the step, equal on all ranks.

    Example:
        >>> cut = ShardLayout.of(BucketLayout.of_shapes({"w": (4,)}), 2)
        >>> weights = Weights(cut, torch.tensor([0.0, 0.0, 3.0, 4.0]), rank=1)
        >>> [v.tolist() for v in weights.own()]
        [[3.0, 4.0]]
    """

    rank: int
    index: int = 0

    @property
    def part(self) -> torch.Tensor:
        """This rank's part, ``(n,)``, a live view."""
        n = self.layout.part.numel
        return self.storage.narrow(0, self.rank * n, n)

    def own(self) -> list[torch.Tensor]:
        """Return this rank's parameters: live 1-D views of :attr:`part`."""
        return self._split(self.part)

    def select(self, names: Iterable[str]) -> "Weights":
        """Return some of the parameters, over the same memory."""
        return Weights(self.layout.select(frozenset(names)), self.storage, self.rank, self.index)


def plain_gather(weights: Weights, scratch: Callable[..., torch.Tensor]) -> Generator[Requests, None, None]:
    """Gather the shards exactly, with one all-gather. Parameters with gaps between them are copied first.

    Args:
        weights: the shards.
        scratch: ``ctx.scratch``.
    """
    segments, n, world = weights.layout.part.segments(), weights.layout.part.numel, weights.world_size
    if segments == ((0, n),):
        yield AllGather(weights.part, weights.storage, castable=weights.storage.is_floating_point())
        return
    size = sum(numel for _, numel in segments)
    if not size:
        return
    dtype, device = weights.storage.dtype, weights.device
    mine, packed = scratch("plain part", (size,), dtype, device), scratch("plain", (world, size), dtype, device)
    parts, at = weights.storage.view(world, n), 0
    for offset, numel in segments:
        mine[at : at + numel].copy_(weights.part[offset : offset + numel])
        at += numel
    yield AllGather(mine, packed.view(-1), castable=dtype.is_floating_point)
    at = 0
    for offset, numel in segments:
        parts[:, offset : offset + numel].copy_(packed[:, at : at + numel])
        at += numel


def plain_scatter(shards: Shards, scratch: Callable[..., torch.Tensor]) -> Generator[Requests, None, None]:
    """Average the parameters exactly, with one reduce-scatter. Parameters with gaps between them are copied first.

    Args:
        shards: the parameters.
        scratch: ``ctx.scratch``.
    """
    segments, n, world = shards.layout.part.segments(), shards.output.numel(), shards.world_size
    if segments == ((0, n),):
        yield ReduceScatter(shards.storage, shards.output, "mean")
        return
    size = sum(numel for _, numel in segments)
    dtype, device = shards.storage.dtype, shards.device
    packed, mine = scratch("plain", (world, size), dtype, device), scratch("plain part", (size,), dtype, device)
    parts, at = shards.storage.view(world, n), 0
    for offset, numel in segments:
        packed[:, at : at + numel].copy_(parts[:, offset : offset + numel])
        at += numel
    if size:
        yield ReduceScatter(packed.view(-1), mine, "mean")
    at = 0
    for offset, numel in segments:
        shards.output[offset : offset + numel].copy_(mine[at : at + numel])
        at += numel
