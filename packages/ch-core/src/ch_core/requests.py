"""The requests of a reduction: the four collectives, as data.

A request names the tensors to send and to fill. A reduction yields one request, or a tuple of requests that may travel
together. When the engine resumes it, the tensors hold the result. This module does not communicate.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch

BF16_BYTES = 4  # per element of bf16_compress: two bytes, and an all-reduce passes the network twice
LATER = 10**6  # a step after every warm-up

Op = Literal["mean", "sum", "max"]
Scope = Literal["all", "node", "peers"]
"""Ranks of a request: all ranks of the group, the ranks of this node, or the ranks with this rank's place on every node."""


@dataclass(frozen=True, slots=True)
class Wire:
    """The element type in which floating-point numbers travel.

    Attributes:
        dtype: ``torch.bfloat16`` or ``torch.float16``.

    Example:
        >>> Wire(torch.bfloat16).narrows(torch.float32)
        True
    """

    dtype: torch.dtype

    def narrows(self, dtype: torch.dtype) -> bool:
        """True if numbers of ``dtype`` become smaller on this wire."""
        return dtype.is_floating_point and dtype.itemsize > self.dtype.itemsize


class RequestPlan(NamedTuple):
    """One request without its numbers. All ranks must plan the same.

    ``numel`` counts the full-size tensor. That is the reduced tensor, the input of a reduce-scatter or all-to-all, or the
    output of an all-gather.
    """

    kind: str
    numel: int
    dtype: torch.dtype
    op: Op = "sum"
    wire: Wire | None = None
    scope: Scope = "all"

    @property
    def payload_bytes(self) -> int:
        """Bytes of the full-size tensor as it travels."""
        return self.numel * (self.wire.dtype if self.wire is not None else self.dtype).itemsize

    @property
    def trip_bytes(self) -> int:
        """Payload times its passes over the network, two for an all-reduce, one for other collectives."""
        return self.payload_bytes * (2 if self.kind == "all_reduce" else 1)


@dataclass(slots=True, eq=False)
class AllReduce:
    """Reduce ``tensor`` over the ranks of ``scope``, in place.

    Args:
        tensor: contiguous tensor of any shape; may be the buffer of the bucket.
        op: ``"mean"`` (each rank multiplies by 1/W before any cast, then sums), ``"sum"`` or ``"max"``. Do not detect NaN by
            ``"max"``, because gloo's drops it.
        wire: element type that travels; ``None`` sends ``tensor.dtype``.
        sent: same shape and dtype as ``tensor``. The engine fills it with this rank's contribution as peers receive it,
            rounded on the wire. Error feedback subtracts it. With ``on_sent`` it may be ``tensor`` itself, which saves a copy.
        on_sent: called after ``sent`` is filled, before ``tensor`` holds received numbers. If it raises, all ranks raise at
            the end of the step.
        scope: ranks that take part, see :data:`Scope`. W and the order of ranks are those of the scope.
    """

    tensor: torch.Tensor
    op: Op = "mean"
    wire: Wire | None = None
    sent: torch.Tensor | None = None
    on_sent: Callable[[], None] | None = None
    scope: Scope = "all"

    kind = "all_reduce"

    def plan(self) -> RequestPlan:
        _reducible(self.tensor, self.op)
        return RequestPlan(self.kind, self.tensor.numel(), self.tensor.dtype, self.op, self.wire, self.scope)


@dataclass(slots=True, eq=False)
class ReduceScatter:
    """Reduce ``input``, W equal parts, and give part r to rank r in ``output``.

    Args:
        input: shape (W * n,). The engine scales it in place if ``op="mean"``.
        output: shape (n,).
        scope: as for :class:`AllReduce`.
    """

    input: torch.Tensor
    output: torch.Tensor
    op: Op = "mean"
    wire: Wire | None = None
    scope: Scope = "all"

    kind = "reduce_scatter"

    def plan(self) -> RequestPlan:
        _reducible(self.input, self.op)
        return RequestPlan(self.kind, self.input.numel(), self.input.dtype, self.op, self.wire, self.scope)


@dataclass(slots=True, eq=False)
class AllGather:
    """Concatenate every rank's ``input`` into ``output``, in rank order.

    Args:
        input: shape (n,), of any dtype. Its bytes are opaque unless ``castable`` or ``wire`` is set.
        output: shape (W * n,), same dtype.
        castable: True if a 16-bit wrapper may round these floating-point numbers; see :attr:`.Reduction.castable`.
        wire: element type in which floating-point numbers travel; ``None`` sends ``input.dtype``.
        sent: shape and dtype of ``input``. The engine fills it with this rank's numbers as peers receive them.
        scope: as for :class:`AllReduce`.
    """

    input: torch.Tensor
    output: torch.Tensor
    castable: bool = False
    wire: Wire | None = None
    sent: torch.Tensor | None = None
    scope: Scope = "all"

    kind = "all_gather"

    def plan(self) -> RequestPlan:
        _roundable(self)
        return RequestPlan(self.kind, self.output.numel(), self.output.dtype, wire=self.wire, scope=self.scope)


@dataclass(slots=True, eq=False)
class AllToAll:
    """Send part r of ``input`` to rank r, and receive rank r's part into part r of ``output``.

    Both have shape (n,), n a multiple of W. See :class:`AllGather` for ``castable``, ``wire``, ``sent`` and ``scope``.
    """

    input: torch.Tensor
    output: torch.Tensor
    castable: bool = False
    wire: Wire | None = None
    sent: torch.Tensor | None = None
    scope: Scope = "all"

    kind = "all_to_all"

    def plan(self) -> RequestPlan:
        _roundable(self)
        return RequestPlan(self.kind, self.input.numel(), self.input.dtype, wire=self.wire, scope=self.scope)


Request = AllReduce | ReduceScatter | AllGather | AllToAll
"""One collective that a reduction asks for."""
_KINDS = frozenset(get_args(Request))


def _roundable(request: AllGather | AllToAll) -> None:
    """Refuse to round packed bytes."""
    if (request.castable or request.wire is not None) and not request.input.is_floating_point():
        raise TypeError(
            f"{type(request).__name__} of {request.input.dtype} cannot be rounded. Only floating-point numbers can: leave out "
            "castable= and wire="
        )


def refusal(request: Request, world_size: int) -> str | None:
    """Return why no transport of this many ranks can carry a request; ``None`` if one can.

    Example:
        >>> refusal(AllGather(torch.zeros(3), torch.zeros(3)), 2)
        'AllGather: output has 3 elements for an input of 3 over 2 ranks; it needs 6, ctx.world_size times the input'
    """
    name = type(request).__name__
    if isinstance(request, AllReduce | ReduceScatter) and request.op not in get_args(Op):
        return (
            f"{name}(op={request.op!r}): expected one of {', '.join(map(repr, get_args(Op)))}. 'mean' divides by the number "
            "of ranks before it sums"
        )
    if isinstance(request, AllReduce):
        return None
    given, filled = request.input.numel(), request.output.numel()
    sizes = f"{name}: output has {filled} elements for an input of {given} over {world_size} ranks; it needs "
    if isinstance(request, AllGather):
        return None if filled == world_size * given else f"{sizes}{world_size * given}, ctx.world_size times the input"
    if given % world_size:
        return (
            f"{name}: an input of {given} elements cannot be cut into {world_size} equal parts, one for each rank; pad it to "
            "a multiple of ctx.world_size"
        )
    if isinstance(request, ReduceScatter):
        part = given // world_size
        return None if filled == part else f"{sizes}{part}, the input divided by ctx.world_size"
    return None if filled == given else f"{sizes}{given}, as many as the input"


def _reducible(tensor: torch.Tensor, op: Op) -> None:
    """Refuse a tensor that no transport carries. Raised here, the error belongs to the reduction of this rank."""
    if op == "mean" and not (tensor.is_floating_point() or tensor.is_complex()):
        raise TypeError(f"a mean of {tensor.dtype} is not defined; send it as op='sum', or as floating point")
    if not tensor.is_sparse and not tensor.is_contiguous():
        raise ValueError(
            f"a tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()} is not contiguous. Request a contiguous "
            "tensor, such as one of ctx.scratch(...)"
        )


Requests = Request | tuple[Request, ...]
"""One request, or several that are sent together, as a reduction yields them."""

StagePlan = tuple[RequestPlan, ...]


def payload_bytes(stages: Iterable[StagePlan]) -> int:
    """Return the bytes that a rank gives to the collectives of some stages."""
    return sum(request.payload_bytes for stage in stages for request in stage)


def trip_bytes(stages: Iterable[StagePlan], ranks_per_node: int = 1) -> int:
    """Return :func:`payload_bytes` times passes over the network. A rank sends (W - 1) / W of it.

    With two levels this counts the network between nodes. Requests inside a node do not count. Requests to the peers count
    for each rank of a node, because each sends its own part of the gradient.
    """
    factor = {"all": 1, "node": 0, "peers": ranks_per_node}
    return sum(request.trip_bytes * factor[request.scope] for stage in stages for request in stage)


def passes_bf16(volume: Callable[[int], int], elements: int, world_size: int) -> int | None:
    """Return the smallest number of ranks at which a hook sends more bytes than ``bf16_compress``.

    Args:
        volume: number of ranks -> bytes of a step, payload times passes.
        elements: elements of the gradient.
        world_size: largest number of ranks to consider.

    Returns:
        A number of at most ``world_size``. ``None`` if that many ranks do not send more, or if the volume does not grow
        with the number of ranks.

    Example:
        >>> passes_bf16(lambda ranks: 500 * ranks, 1000, 64)
        9
        >>> passes_bf16(lambda ranks: 500 * ranks, 1000, 8), passes_bf16(lambda ranks: 8000, 1000, 64)
        (None, None)
    """
    limit = BF16_BYTES * elements
    now = volume(world_size)
    if now <= limit or 4 * volume(2 * world_size) < 5 * now:
        return None
    fits, over = 0, world_size
    while over - fits > 1:
        middle = (fits + over) // 2
        fits, over = (middle, over) if volume(middle) <= limit else (fits, middle)
    return over


def as_tuple(requests: object) -> tuple[Request, ...]:
    """Return a yielded value as a tuple of requests.

    Raises:
        TypeError: it is neither a request nor a tuple of requests.
    """
    found = requests if isinstance(requests, tuple) else (requests,)
    if _KINDS.issuperset(map(type, found)):  # fast: every bucket passes here, often with dozens of requests
        return found
    for r in found:
        if not isinstance(r, Request):
            raise TypeError(
                f"a reduction yielded {type(r).__name__}; it may yield AllReduce, ReduceScatter, AllGather, AllToAll, "
                "or a tuple of them"
            )
    return found
