"""Gradient buckets: one flat buffer with a named view per parameter.

A reduction works on a :class:`Bucket`. Adapters build it from torch's ``GradBucket`` or from an FSDP shard.
:meth:`Bucket.from_tensors` builds it from plain tensors, so that a hook can be tested without a process group.

A :class:`BucketLayout` is the bucket without its numbers. It is hashable, equal on every rank, and enough to plan all
collectives of a reduction.
"""

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from hashlib import blake2b
from typing import Any, Concatenate, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

import torch

S = TypeVar("S")
T = TypeVar("T")
P = ParamSpec("P")

_RUNS, _SELECTED = object(), object()  # cache keys of every bucket


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides, in elements, of a tensor of ``shape``.

    >>> contiguous_stride((2, 3, 4))
    (12, 4, 1)
    """
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def dense(param: torch.Tensor) -> bool:
    """Return True if the strides are a permutation of row-major ones: without overlap, and without holes."""
    expected = 1
    for stride, size in sorted(zip(param.stride(), param.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


@dataclass(frozen=True, slots=True)
class ParamLayout:
    """Place of one parameter's gradient in a bucket.

    Attributes:
        name: fully qualified parameter name, the key of all state.
        shape: logical shape of the parameter.
        stride: strides in elements inside the bucket. A dense parameter has its own, so that a transposed or channels-last
            parameter is seen with its numbers in the right places.
        offset: first element, counted from the start of the bucket's storage.
        kind: ``"dense"``; ``"complex"`` and ``"sparse"`` parameters can only be averaged exactly.
        numel: number of elements.
        matrix_shape: ``(outer, inner)``: the axis that is outermost in memory, and all other axes. For a row-major weight
            it is ``(dim 0, rest)``, for a transposed one the transposed matrix, for a channels-last one a permutation of
            the columns. Each is the same problem to a low-rank method.
    """

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    kind: str = "dense"
    numel: int = field(init=False, repr=False, compare=False)
    matrix_shape: tuple[int, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        numel = math.prod(self.shape)
        object.__setattr__(self, "numel", numel)
        object.__setattr__(self, "matrix_shape", _matrix_shape(self.shape, self.stride, numel))

    @staticmethod
    def of(name: str, tensor: torch.Tensor, offset: int = 0, kind: str = "dense") -> "ParamLayout":
        """Return the layout of a parameter's gradient: its own strides if they leave no holes, else row-major.

        >>> ParamLayout.of("w", torch.empty(3, 2).t()).stride, ParamLayout.of("w", torch.empty(3, 2)[:, :1]).stride
        ((1, 2), (1, 1))
        """
        stride = tuple(tensor.stride()) if dense(tensor) else contiguous_stride(tensor.shape)
        return ParamLayout(name, tuple(tensor.shape), stride, offset, kind)

    @property
    def plain_only(self) -> str | None:
        """Reason to average this parameter exactly: ``"complex"``, ``"sparse"`` or ``"empty"``; else ``None``."""
        return self.kind if self.kind != "dense" else "empty" if self.numel == 0 else None

    def to_memory_order(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a tensor of :attr:`shape` to the order of memory, ``(outer, inner)``, as :meth:`Bucket.matrix` shows it.

        >>> turned = ParamLayout("w", (2, 3), (1, 2), 0)  # stored as (3, 2)
        >>> turned.to_memory_order(torch.arange(6).view(2, 3))
        tensor([[0, 3],
                [1, 4],
                [2, 5]])
        >>> turned.to_own_shape(turned.to_memory_order(torch.arange(6).view(2, 3)))
        tensor([[0, 1, 2],
                [3, 4, 5]])
        """
        flat = torch.empty(self.numel, dtype=tensor.dtype, device=tensor.device)
        flat.as_strided(self.shape, self.stride).copy_(tensor.view(self.shape))
        return flat.view(self.matrix_shape)

    def to_own_shape(self, matrix: torch.Tensor) -> torch.Tensor:
        """Copy a matrix of :meth:`to_memory_order` back to the parameter's own shape and order."""
        return matrix.reshape(-1).as_strided(self.shape, self.stride).clone(memory_format=torch.contiguous_format)


def _matrix_shape(shape: tuple[int, ...], stride: tuple[int, ...], numel: int) -> tuple[int, int]:
    if not shape or numel == 0:
        return (1, numel)
    outermost = max(range(len(shape)), key=lambda axis: (stride[axis], -axis))
    return (shape[outermost], numel // shape[outermost])


class BucketLayout:
    """Names, shapes, dtype and device of a bucket. It is hashable and holds no numbers.

    Args:
        params: the parameters, in the order of the buffer.
        numel: elements of the underlying storage, which may be more than those of ``params``.
        dtype: dtype of the buffer.
        device: device of the buffer.

    Attributes:
        size: elements of all parameters together.
    """

    __slots__ = ("__dict__", "_hash", "_key", "device", "dtype", "numel", "params", "size")

    def __init__(
        self, params: Iterable[ParamLayout], numel: int, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> None:
        self.params = tuple(params)
        self.numel = numel
        self.size = sum(p.numel for p in self.params)
        self.dtype = dtype
        self.device = torch.device(device)
        self._key = (self.params, numel, dtype, self.device)
        self._hash = hash(self._key)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, BucketLayout):
            return NotImplemented
        return self._key == other._key

    def __repr__(self) -> str:
        return f"BucketLayout({len(self.params)} parameters, {self.size} elements, {self.dtype})"

    @property
    def digest(self) -> bytes:
        """Digest of shapes, order of memory, places and dtype, equal in all processes. Ranks may have other names and devices."""
        cached: bytes | None = self.__dict__.get("_digest")
        if cached is None:
            # The stride of an axis with one element has no meaning, so ranks may differ in it.
            strides = [[s for s, size in zip(p.stride, p.shape, strict=True) if size != 1] for p in self.params]
            rows = [(p.shape, s, p.offset, p.kind) for p, s in zip(self.params, strides, strict=True)]
            said = repr((rows, self.numel, str(self.dtype)))
            cached = self.__dict__["_digest"] = blake2b(said.encode(), digest_size=8).digest()
        return cached

    def segments(self) -> tuple[tuple[int, int], ...]:
        """Return ``(offset, numel)`` of each contiguous piece of storage that the parameters cover."""
        cached: tuple[tuple[int, int], ...] | None = self.__dict__.get("_runs")
        if cached is None:
            pieces: list[list[int]] = []
            for p in sorted(self.params, key=lambda p: p.offset):
                if p.numel == 0:
                    continue
                if pieces and pieces[-1][0] + pieces[-1][1] == p.offset:
                    pieces[-1][1] += p.numel
                else:
                    pieces.append([p.offset, p.numel])
            cached = self.__dict__["_runs"] = tuple((a, n) for a, n in pieces)
        return cached

    def select(self, names: frozenset[str]) -> "BucketLayout":
        """Return the layout of a sub-bucket that holds only ``names``, over the same storage."""
        cache: dict[frozenset[str], BucketLayout] = self.__dict__.setdefault("_selected", {})
        if names not in cache:
            chosen = (p for p in self.params if p.name in names)
            cache[names] = BucketLayout(chosen, self.numel, self.dtype, self.device)
        return cache[names]

    @staticmethod
    def of_tensors(tensors: Mapping[str, torch.Tensor], kinds: Mapping[str, str] | None = None) -> "BucketLayout":
        """Lay parameters one after another as one virtual bucket, each as :meth:`ParamLayout.of` does.

        Its dtype and device are those of the last tensor. For tensors of several see :meth:`by_dtype`.

        Args:
            tensors: name -> parameter, in model order.
            kinds: name -> kind of each parameter that is not ``"dense"``, see :class:`ParamLayout`.

        >>> layout = BucketLayout.of_tensors({"w": torch.ones(2, 3), "b": torch.ones(3)})
        >>> layout.numel, layout.dtype
        (9, torch.float32)
        """
        params, offset, dtype, device = [], 0, torch.float32, torch.device("cpu")
        for name, tensor in tensors.items():
            params.append(ParamLayout.of(name, tensor, offset, (kinds or {}).get(name, "dense")))
            offset += tensor.numel()
            dtype, device = tensor.dtype, tensor.device
        return BucketLayout(params, offset, dtype, device)

    @staticmethod
    def by_dtype(tensors: Mapping[str, torch.Tensor], kinds: Mapping[str, str] | None = None) -> "list[BucketLayout]":
        """Return one virtual bucket for each dtype and device of the parameters, as :meth:`of_tensors` lays them.

        >>> layouts = BucketLayout.by_dtype({"w": torch.ones(2, 3), "h": torch.ones(2).bfloat16(), "b": torch.ones(3)})
        >>> [(layout.dtype, [p.name for p in layout.params]) for layout in layouts]
        [(torch.float32, ['w', 'b']), (torch.bfloat16, ['h'])]
        """
        groups: dict[object, dict[str, torch.Tensor]] = {}
        for name, tensor in tensors.items():
            groups.setdefault((tensor.dtype, tensor.device), {})[name] = tensor
        return [BucketLayout.of_tensors(group, kinds) for group in groups.values()]

    @staticmethod
    def of_shapes(
        shapes: Mapping[str, Sequence[int]], dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> "BucketLayout":
        """Return the row-major layout of parameters laid one after another.

        >>> BucketLayout.of_shapes({"w": (2, 3), "b": (3,)}).params[1].offset
        6
        """
        params, offset = [], 0
        for name, shape in shapes.items():
            param = ParamLayout(name, tuple(shape), contiguous_stride(shape), offset)
            params.append(param)
            offset += param.numel
        return BucketLayout(params, offset, dtype, device)


@dataclass(slots=True)
class Bucket:
    """Flat gradient buffer with named views.

    Attributes:
        layout: names, shapes and offsets.
        storage: 1-D tensor that the layout's offsets index. The gradient is read from it and, when a reduction has
            ended, the averaged gradient is in it. Do not replace it, because views of it are cached.
        index: position in the step, equal on all ranks.
        is_last: the step's last bucket.
        unused: names of parameters that this rank has no gradient for: zeros are in their places.
        output: tensor that receives this rank's part of the average; ``None`` if the average is left in ``storage``.

    Example:
        >>> import torch
        >>> b = Bucket.from_tensors({"w": torch.ones(2, 3), "b": torch.zeros(3)})
        >>> [(p.name, p.shape) for p in b.params]
        [('w', (2, 3)), ('b', (3,))]
        >>> b.view("w").fill_(2.0).sum() == b.buffer.sum()
        tensor(True)
    """

    layout: BucketLayout
    storage: torch.Tensor
    index: int = 0
    is_last: bool = True
    unused: frozenset[str] = frozenset()
    output: torch.Tensor | None = None
    _by_name: dict[str, ParamLayout] = field(default_factory=dict, init=False, repr=False, compare=False)
    _kept: dict[Hashable, tuple[object, Any]] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, torch.Tensor], *, index: int = 0, is_last: bool = True) -> "Bucket":
        """Copy tensors of one dtype and device into a new bucket, each row-major.

        Raises:
            ValueError: no tensors, or tensors of several dtypes or devices.
        """
        if not tensors:
            raise ValueError("Bucket.from_tensors got no tensors; give at least one name -> tensor")
        first = next(iter(tensors.values()))
        odd = [n for n, t in tensors.items() if t.dtype != first.dtype or t.device != first.device]
        if odd:
            raise ValueError(f"all tensors of a bucket share dtype and device ({first.dtype}); these do not: {odd}")
        layout = BucketLayout.of_shapes({n: t.shape for n, t in tensors.items()}, first.dtype, first.device)
        storage = torch.cat([t.detach().reshape(-1) for t in tensors.values()])
        return cls(layout, storage, index, is_last)

    @property
    def params(self) -> tuple[ParamLayout, ...]:
        return self.layout.params

    @property
    def dtype(self) -> torch.dtype:
        return self.storage.dtype

    @property
    def device(self) -> torch.device:
        return self.storage.device

    def view(self, param: ParamLayout | str) -> torch.Tensor:
        """Return a live view with the parameter's logical shape and its own strides; of a sparse bucket, its storage."""
        p = self._param(param)
        if self.storage.is_sparse:
            return self.storage
        return self._flat(p).as_strided(p.shape, p.stride)

    def matrix(self, param: ParamLayout | str) -> torch.Tensor:
        """Return a live contiguous view of shape :attr:`ParamLayout.matrix_shape`."""
        p = self._param(param)
        return self._flat(p).view(p.matrix_shape)

    def views(self) -> Iterator[tuple[ParamLayout, torch.Tensor]]:
        """Return every parameter with its live view."""
        return ((p, self.view(p)) for p in self.params)

    def segments(self) -> list[torch.Tensor]:
        """Return the contiguous 1-D pieces that hold the parameters, as live views. An undivided bucket has one."""
        return list(self.cached(_RUNS, self._cut))

    @property
    def buffer(self) -> torch.Tensor:
        """All parameters as one 1-D tensor.

        It is a live view if they are one piece of storage. For a sub-bucket of several pieces it is a gathered copy, which
        must be assigned back (``bucket.buffer = x``) to take effect.
        """
        runs = self.segments()
        if len(runs) == 1:
            return runs[0]
        return torch.cat(runs) if runs else self.storage.narrow(0, 0, 0)

    @buffer.setter
    def buffer(self, flat: torch.Tensor) -> None:
        runs = self.segments()
        size = sum(r.numel() for r in runs)
        if flat.numel() != size:
            raise ValueError(f"the bucket holds {size} elements, the new buffer {flat.numel()}")
        for run, piece in zip(runs, flat.reshape(-1).split([r.numel() for r in runs]), strict=True):
            if run.data_ptr() != piece.data_ptr():
                run.copy_(piece)

    def select(self, names: Iterable[str]) -> "Bucket":
        """Return a sub-bucket of some parameters, over the same storage."""
        chosen = frozenset(names)
        return self.cached(
            (_SELECTED, chosen), lambda: Bucket(self.layout.select(chosen), self.storage, self.index, self.is_last)
        )

    def cached(self, key: Hashable, make: Callable[[], T], of: object = None) -> T:
        """Return ``make()``, called once in the life of this bucket. DDP's buckets live from step to step.

        Use it only for views of :attr:`storage` (:meth:`view`, :meth:`matrix`, :meth:`segments`). Never use it for
        numbers or for :attr:`buffer`, which may be a copy. A view costs little, but between two passes over a large
        gradient the code that makes it has left the core's cache.

        Args:
            key: cache key that no other caller has, such as ``(self, "halves")`` in a reduction.
            make: makes the value from the bucket and ``of``.
            of: second input of ``make``. Another object makes the value again.

        >>> import torch
        >>> b, mine = Bucket.from_tensors({"w": torch.ones(4, 2)}), object()
        >>> top, _ = b.cached((mine, "halves"), lambda: b.matrix("w").chunk(2))
        >>> top is b.cached((mine, "halves"), lambda: b.matrix("w").chunk(2))[0]
        True
        """
        found = self._kept.get(key)
        if found is None or found[0] is not of:
            found = self._kept[key] = (of, make())
        value: T = found[1]
        return value

    def _param(self, param: ParamLayout | str) -> ParamLayout:
        if isinstance(param, ParamLayout):
            return param
        if not self._by_name:
            self._by_name.update((p.name, p) for p in self.params)
        if param not in self._by_name:
            raise KeyError(f"no parameter {param!r} in this bucket; it holds {sorted(self._by_name)}")
        return self._by_name[param]

    def _cut(self) -> list[torch.Tensor]:
        if self.storage.is_sparse:
            return [self.storage]
        return [self.storage.narrow(0, offset, numel) for offset, numel in self.layout.segments()]

    def _flat(self, p: ParamLayout) -> torch.Tensor:
        return self.storage.narrow(0, p.offset, p.numel)


def per_layout(make: Callable[Concatenate[S, BucketLayout, P], T]) -> Callable[Concatenate[S, BucketLayout, P], T]:
    """Cache the result of a method ``(self, layout, ...)`` for each layout, in the life of its object.

    Use it for values that follow from shapes and names alone. Copies and pickles of the reduction leave the results out. A
    result must not refer to the reduction, or it would never be freed. Further arguments matter only when a result is made.

    >>> class Mine:
    ...     @per_layout
    ...     def rows(self, layout):
    ...         print("made")
    ...         return [p.matrix_shape[0] for p in layout.params]
    >>> mine, layout = Mine(), BucketLayout.of_shapes({"w": (4, 2)})
    >>> mine.rows(layout), mine.rows(BucketLayout.of_shapes({"w": (4, 2)}))
    made
    ([4], [4])
    """
    kept: WeakKeyDictionary[S, dict[BucketLayout, T]] = WeakKeyDictionary()

    @wraps(make)
    def method(self: S, layout: BucketLayout, /, *args: P.args, **kwargs: P.kwargs) -> T:
        made = kept.setdefault(self, {})
        if layout not in made:
            made[layout] = make(self, layout, *args, **kwargs)
        return made[layout]

    return method
