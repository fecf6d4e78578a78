"""What a reduction may ask for: the four collectives, as data.

A request names the tensors to send and to fill. A reduction yields one request, or a tuple of requests that may
travel together; when it is resumed the tensors hold the result. Nothing here communicates.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch

Op = Literal["mean", "sum", "max"]


@dataclass(frozen=True, slots=True)
class Wire:
    """How floating-point numbers travel: the element type on the wire.

    Attributes:
        dtype: ``torch.bfloat16`` or ``torch.float16``.
        rounding: ``"nearest"``, or ``"stochastic"`` (unbiased: E[round(x)] = x).
    """

    dtype: torch.dtype
    rounding: Literal["nearest", "stochastic"] = "nearest"

    def narrows(self, dtype: torch.dtype) -> bool:
        """Whether numbers of ``dtype`` become smaller on this wire."""
        return dtype.is_floating_point and dtype.itemsize > self.dtype.itemsize


class RequestPlan(NamedTuple):
    """One request without its numbers: what all ranks must agree on.

    ``numel`` counts the full-size tensor: the reduced one, the input of a reduce-scatter or all-to-all, the output
    of an all-gather.
    """

    kind: str
    numel: int
    dtype: torch.dtype
    op: Op = "sum"
    wire: Wire | None = None

    @property
    def payload_bytes(self) -> int:
        """Bytes of the full-size tensor as it travels."""
        return self.numel * (self.wire.dtype if self.wire is not None else self.dtype).itemsize

    @property
    def trip_bytes(self) -> int:
        """Payload times the passes it makes over the network: two for an all-reduce, one for the others."""
        return self.payload_bytes * (2 if self.kind == "all_reduce" else 1)


@dataclass(slots=True, eq=False)
class AllReduce:
    """Reduce ``tensor`` over all ranks, in place.

    Args:
        tensor: contiguous tensor of any shape; may be the bucket's own buffer.
        op: ``"mean"`` (each rank multiplies by 1/W before any cast, then sums), ``"sum"``, ``"max"``.
            Never decide anything by ``"max"`` on floats: gloo's drops NaN.
        wire: element type that travels; ``None`` sends ``tensor.dtype``.
        sent: if given (same shape and dtype as ``tensor``), filled with this rank's own contribution as the
            others receive it, after rounding on the wire: what error feedback has to subtract. With ``on_sent`` it may be
            ``tensor`` itself, which saves a copy.
        on_sent: called once ``sent`` is filled, and before ``tensor`` holds anything received; it must not raise.
    """

    tensor: torch.Tensor
    op: Op = "mean"
    wire: Wire | None = None
    sent: torch.Tensor | None = None
    on_sent: Callable[[], None] | None = None

    kind = "all_reduce"

    def plan(self) -> RequestPlan:
        _reducible(self.tensor, self.op)
        return RequestPlan(self.kind, self.tensor.numel(), self.tensor.dtype, self.op, self.wire)


@dataclass(slots=True, eq=False)
class ReduceScatter:
    """Reduce ``input`` (W equal parts) and give part r to rank r in ``output``.

    Args:
        input: 1-D, ``W * n`` elements. Scaled in place when ``op="mean"``.
        output: 1-D, ``n`` elements.
    """

    input: torch.Tensor
    output: torch.Tensor
    op: Op = "mean"
    wire: Wire | None = None

    kind = "reduce_scatter"

    def plan(self) -> RequestPlan:
        _reducible(self.input, self.op)
        return RequestPlan(self.kind, self.input.numel(), self.input.dtype, self.op, self.wire)


@dataclass(slots=True, eq=False)
class AllGather:
    """Concatenate every rank's ``input`` (``n`` elements) into ``output`` (``W * n``), in rank order.

    Args:
        input: 1-D, ``n`` elements of any dtype. Its bytes are opaque, unless one of the next two says otherwise.
        output: 1-D, ``W * n`` elements of the same dtype.
        castable: these are floating-point numbers that a 16-bit wrapper may round; see :attr:`.Reduction.castable`.
        wire: element type that floating-point numbers travel in; ``None`` sends ``input.dtype``.
        sent: if given (like ``input``), filled with what the others receive of this rank, after rounding on the wire.
    """

    input: torch.Tensor
    output: torch.Tensor
    castable: bool = False
    wire: Wire | None = None
    sent: torch.Tensor | None = None

    kind = "all_gather"

    def plan(self) -> RequestPlan:
        _roundable(self)
        return RequestPlan(self.kind, self.output.numel(), self.output.dtype, wire=self.wire)


@dataclass(slots=True, eq=False)
class AllToAll:
    """Send part r of ``input`` to rank r, receive rank r's part into part r of ``output``.

    Both are 1-D with the same number of elements, a multiple of W. ``castable``, ``wire`` and ``sent`` are as those of
    :class:`AllGather`.
    """

    input: torch.Tensor
    output: torch.Tensor
    castable: bool = False
    wire: Wire | None = None
    sent: torch.Tensor | None = None

    kind = "all_to_all"

    def plan(self) -> RequestPlan:
        _roundable(self)
        return RequestPlan(self.kind, self.input.numel(), self.input.dtype, wire=self.wire)


Request = AllReduce | ReduceScatter | AllGather | AllToAll
"""One collective that a reduction asks for."""
_KINDS = frozenset(get_args(Request))


def _roundable(request: AllGather | AllToAll) -> None:
    """Refuse to round what are no numbers, such as packed bytes."""
    if (request.castable or request.wire is not None) and not request.input.is_floating_point():
        raise TypeError(
            f"{type(request).__name__} of {request.input.dtype} cannot be rounded: give castable= and wire= for floating-"
            "point numbers only; other bytes travel as they are"
        )


def refusal(request: Request, world_size: int) -> str | None:
    """Why no transport of so many ranks can carry a request: what was given, what is legal, what to do; ``None`` if one can.

    Example:
        >>> refusal(AllGather(torch.zeros(3), torch.zeros(3)), 2)
        'AllGather: output has 3 elements for an input of 3 over 2 ranks; it needs 6, ctx.world_size times the input'
    """
    name = type(request).__name__
    if isinstance(request, AllReduce | ReduceScatter) and request.op not in get_args(Op):
        return (
            f"{name}(op={request.op!r}): an op is one of {', '.join(map(repr, get_args(Op)))}; 'mean' divides by the number "
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
    """Refuse what a transport would fail on, while the rank's own generator is still to blame and can be replaced."""
    if op == "mean" and not (tensor.is_floating_point() or tensor.is_complex()):
        raise TypeError(f"a mean of {tensor.dtype} is not defined; send it as op='sum', or as floating point")
    if not tensor.is_sparse and not tensor.is_contiguous():
        raise ValueError(f"a tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()} is not contiguous")


Requests = Request | tuple[Request, ...]
"""What a reduction may yield, one request or several that are sent together."""

StagePlan = tuple[RequestPlan, ...]


def payload_bytes(stages: Iterable[StagePlan]) -> int:
    """Bytes that a rank gives to the collectives of some stages."""
    return sum(request.payload_bytes for stage in stages for request in stage)


def trip_bytes(stages: Iterable[StagePlan]) -> int:
    """:func:`payload_bytes` times the passes over the network: to be multiplied by (W - 1) / W, what a rank sends."""
    return sum(request.trip_bytes for stage in stages for request in stage)


def as_tuple(requests: object) -> tuple[Request, ...]:
    """The yielded value as a tuple of requests; ``TypeError`` for anything else."""
    found = requests if isinstance(requests, tuple) else (requests,)
    if _KINDS.issuperset(map(type, found)):  # asked for every bucket, often with dozens of requests
        return found
    for r in found:
        if not isinstance(r, Request):
            raise TypeError(
                f"a reduction yielded {type(r).__name__}; it may yield AllReduce, ReduceScatter, AllGather, AllToAll, "
                "or a tuple of them"
            )
    return found
