"""Transports: where collectives really happen.

A transport starts raw collectives on flat tensors and nothing else. What a mean is, what travels on the wire and
which requests are merged is decided once, in :class:`Stage`, for every transport alike.
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from commhooks.errors import HookTimeoutError, TransportError
from commhooks.requests import AllGather, AllReduce, AllToAll, ReduceScatter, Request, Wire
from commhooks.scratch import Scratch

# torch 2.13 renames the flat collectives and warns of the old names at every call.
_ALL_GATHER: Any = getattr(dist, "all_gather_single", None) or getattr(dist, "all_gather_into_tensor", None)
_REDUCE_SCATTER: Any = getattr(dist, "reduce_scatter_single", None) or getattr(dist, "reduce_scatter_tensor", None)


_BLOCK = 1 << 16  # elements of fp32 that stay in a core's cache between two passes
_LONG = 4 << 20  # bytes from which on a message is worth two threads
# Bytes up to which two ranks swap their numbers, and bytes more than a ring's that more ranks may spend on it. On
# slow links a swap of longer messages takes longer than the ring's two halves, one after the other, do.
_SWAPPED, _SPENT = 1 << 17, 1 << 15
_SHORT, _AWAKE = 1 << 20, 0.002  # bytes of a short message, and seconds to stay awake for it
_give_way: Callable[[], object] = getattr(os, "sched_yield", lambda: time.sleep(0))


class Work(Protocol):
    """A collective under way."""

    def wait(self, timeout: float | None) -> None:
        """Return when it is done.

        Raises:
            HookTimeoutError: not done after ``timeout`` seconds.
            TransportError: it failed (a peer was lost, sizes did not match).
        """


class Transport(Protocol):
    """Raw collectives of one group of ranks, on contiguous tensors, all asynchronous.

    Attributes:
        rank: this rank in the group.
        world_size: ranks in the group.
        divides: whether :meth:`all_reduce` with op ``"mean"`` divides by itself, because only it knows how many
            take part (a fault-tolerance manager). If not, ``"mean"`` never reaches it.
        free: whether the ranks are free to carry out an all-reduce on a CPU as is best, because all of them run this
            engine. Not where a peer without a hook has to match the messages.
        elastic: whether rank and world size change from step to step (a manager's members come and go).
    """

    rank: int
    world_size: int
    divides: bool
    free: bool
    elastic: bool

    def all_reduce(self, tensor: torch.Tensor, op: str) -> Work: ...

    def all_gather(self, output: torch.Tensor, input: torch.Tensor) -> Work: ...

    def all_to_all(self, output: torch.Tensor, input: torch.Tensor) -> Work: ...

    def reduce_scatter(self, output: torch.Tensor, input: torch.Tensor, op: str) -> Work: ...

    def abort(self) -> None:
        """Give up: nothing more will be started, pending work may never end."""


class _GroupWork:
    """``torch.distributed`` work with a deadline and typed errors; keeps its tensors alive until it is done."""

    __slots__ = ("_keep", "_what", "_work")

    def __init__(self, work: dist.Work, what: str, *keep: torch.Tensor) -> None:
        self._work, self._what, self._keep = work, what, keep

    def wait(self, timeout: float | None) -> None:
        on_cpu = not self._keep[0].is_cuda
        begun = time.monotonic()
        if on_cpu and self._keep[0].numel() * self._keep[0].itemsize <= _SHORT:
            self._stay_awake(begun)
        try:
            # On CUDA a timeout would make the host wait for the kernel; the stream waits instead.
            if timeout is not None and on_cpu:
                self._work.wait(timedelta(seconds=timeout))
            else:
                self._work.wait()
        except RuntimeError as error:
            waited = time.monotonic() - begun
            if timeout is not None and waited >= 0.95 * timeout:
                raise HookTimeoutError(
                    f"{self._what} was not done after {waited:.1f} s (deadline {timeout:g} s): a rank is frozen, or "
                    "does not take part in the same collectives. Raise attach(timeout=...) if ranks are merely slow"
                ) from error
            raise TransportError(f"{self._what} failed: {error}") from error

    def _stay_awake(self, begun: float) -> None:
        """Wait for a short message without going to sleep: waking up can take longer than the message, on a virtual
        machine by milliseconds. Whoever else wants the core gets it.
        """
        while not self._work.is_completed() and time.monotonic() - begun < _AWAKE:
            _give_way()


class ProcessGroupTransport:
    """Collectives over a ``torch.distributed`` process group.

    Args:
        group: the group; ``None`` is the default group.
        free: see :class:`Transport`; granted where gloo carries a CPU's tensors. Another backend may lack some
            collectives, or be there to see those it is asked for.

    Raises:
        TransportError: there is no process group.
    """

    divides = False
    elastic = False
    _OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX} if dist.is_available() else {}

    def __init__(self, group: dist.ProcessGroup | None = None, *, free: bool = False) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise TransportError(
                "no process group: call torch.distributed.init_process_group(...) first, "
                "or run over simulated ranks with commhooks.simulate"
            )
        self.group = group if group is not None else dist.group.WORLD
        self.rank = dist.get_rank(self.group)
        self.world_size = dist.get_world_size(self.group)
        self.free = free and _by_gloo(self.group)

    def all_reduce(self, tensor: torch.Tensor, op: str) -> Work:
        return self._start("all-reduce", dist.all_reduce, tensor, op=self._OPS[op])

    def all_gather(self, output: torch.Tensor, input: torch.Tensor) -> Work:
        return self._start("all-gather", _ALL_GATHER, output, input)

    def all_to_all(self, output: torch.Tensor, input: torch.Tensor) -> Work:
        return self._start("all-to-all", dist.all_to_all_single, output, input)

    def reduce_scatter(self, output: torch.Tensor, input: torch.Tensor, op: str) -> Work:
        return self._start("reduce-scatter", _REDUCE_SCATTER, output, input, op=self._OPS[op])

    def abort(self) -> None:
        """Nothing to do: the group belongs to the caller, who destroys it."""

    def _start(self, what: str, collective: Callable[..., dist.Work], *tensors: torch.Tensor, **kwargs: object) -> Work:
        try:
            work = collective(*tensors, group=self.group, async_op=True, **kwargs)
        except RuntimeError as error:
            raise TransportError(f"{what} could not be started: {error}") from error
        return _GroupWork(work, what, *tensors)


@dataclass(slots=True)
class Traffic:
    """What collectives carried, per rank: exact, but that wire bytes are those of bandwidth-optimal algorithms."""

    payload_bytes: float = 0.0
    wire_bytes: float = 0.0
    trip_bytes: float = 0.0
    rounds: int = 0

    def add(self, payload_bytes: int, trip_bytes: int, world_size: int) -> None:
        """Some requests of a rank, as :class:`~commhooks.requests.RequestPlan` counts their bytes."""
        self.payload_bytes += payload_bytes
        self.trip_bytes += trip_bytes
        self.wire_bytes += trip_bytes * (world_size - 1) / world_size


@dataclass(slots=True)
class Stage:
    """The requests of one stage, under way.

    Starting one encodes (scale by 1/W, cast, merge) and starts the collectives; :meth:`wait` waits and decodes.
    All-reduces of equal dtype, op and wire are merged into one message.

    Attributes:
        any_order: whether sums of unrounded numbers may be added up in another order than DDP's.
    """

    transport: Transport
    scratch: Scratch
    owner: object
    any_order: bool = False
    _works: list[tuple[Work, Callable[[], None] | None]] = field(default_factory=list)
    reduced: list[torch.Tensor] = field(default_factory=list)

    def start(self, requests: tuple[Request, ...]) -> "Stage":
        groups: dict[object, list[AllReduce]] = {}
        for number, request in enumerate(requests):
            if isinstance(request, AllReduce):
                if request.tensor.is_sparse:
                    self._sparse(request)
                elif request.tensor.numel():
                    key = (request.tensor.dtype, request.op, request.wire)
                    groups.setdefault(key, []).append(request)
            else:
                self._other(number, request)
        for number, group in enumerate(groups.values()):
            self._all_reduce(number, group)
        return self

    def wait(self, timeout: float | None) -> None:
        """Finish every collective and put the results where the requests want them."""
        for work, decode in self._works:
            work.wait(timeout)
            if decode is not None:
                decode()
        self._works.clear()

    # -- all-reduce

    def _all_reduce(self, number: int, group: list[AllReduce]) -> None:
        first = group[0]
        tensor, wire = first.tensor, first.wire
        scale = self._scale(first.op)
        if len(group) == 1 and wire is None:
            self.reduced.append(tensor)
            if first.sent is not None:
                first.sent.copy_(tensor)
            if scale != 1.0:
                tensor.mul_(scale)
            self._reduce(number, tensor.view(-1), first, None)
            return
        total = sum(r.tensor.numel() for r in group)
        dtype = wire.dtype if wire is not None else tensor.dtype
        merged = self.scratch.get(self.owner, f"stage all-reduce {number}", (total,), dtype, tensor.device)
        tensors = [r.tensor.view(-1) for r in group]
        parts = list(torch.split_with_sizes(merged, [t.numel() for t in tensors]))
        if wire is None:
            torch._foreach_copy_(parts, tensors)
            if scale != 1.0:
                merged.mul_(scale)
        else:
            for source, part in zip(tensors, parts, strict=True):
                encode(source, part, scale, wire)
        for request, part in zip(group, parts, strict=True):
            if request.sent is not None:
                request.sent.copy_(part.view(request.sent.shape)).mul_(1.0 / scale)
        self.reduced.append(merged)  # one sum tells of all whether something is not finite
        self._reduce(number, merged, first, lambda: torch._foreach_copy_(tensors, parts))

    def _reduce(self, number: int, flat: torch.Tensor, like: AllReduce, decode: Callable[[], None] | None) -> None:
        """Start the message in the way that costs least, where the transport leaves that open. With more than two
        ranks the order in which they are added up depends on the way; what no cast has rounded is then sent as DDP
        sends it, and its average is DDP's to the bit, unless nobody counts on that.
        """
        size, op = flat.numel() * flat.itemsize, self._op(like.op)
        free = self.transport.free and flat.device.type == "cpu"
        if free and (self.any_order or self.transport.world_size == 2 or like.wire is not None):
            if op == "sum" and flat.is_floating_point() and _worth_swapping(size, self.transport.world_size):
                self._swap(number, flat, decode)
                return
            if size >= _LONG:  # gloo has two threads a group, each busy with one message
                ahead, flat = flat.chunk(2)
                self._add(self.transport.all_reduce(ahead, op), None)
        self._add(self.transport.all_reduce(flat, op), decode)

    def _swap(self, number: int, flat: torch.Tensor, decode: Callable[[], None] | None) -> None:
        """An all-reduce of few numbers: each rank sends all of them to every other, and adds up what has come in the
        order of the ranks. That is one message to wait for; a ring has ``2 (W - 1)``, one after another.
        """
        shape = (self.transport.world_size, flat.numel())
        sent, received = (
            self.scratch.get(self.owner, f"stage {what} {number}", shape, flat.dtype, flat.device)
            for what in ("sent", "received")
        )
        sent.copy_(flat)

        def add_up() -> None:
            first, second, *others = received.unbind(0)
            torch.add(first, second, out=flat)
            for row in others:
                flat.add_(row)
            if decode is not None:
                decode()

        self._add(self.transport.all_to_all(received.view(-1), sent.view(-1)), add_up)

    def _sparse(self, request: AllReduce) -> None:
        scale = self._scale(request.op)
        if scale != 1.0:
            request.tensor.mul_(scale)
        self._add(self.transport.all_reduce(request.tensor, self._op(request.op)), None)

    # -- the others

    def _other(self, number: int, request: Request) -> None:
        if isinstance(request, AllGather):
            self._add(self.transport.all_gather(request.output, request.input), None)
        elif isinstance(request, AllToAll):
            self._add(self.transport.all_to_all(request.output, request.input), None)
        elif isinstance(request, ReduceScatter):
            self._reduce_scatter(number, request)

    def _reduce_scatter(self, number: int, request: ReduceScatter) -> None:
        scale, wire = self._scale(request.op), request.wire
        self.reduced.append(request.output)
        if wire is None:
            if scale != 1.0:
                request.input.mul_(scale)
            work = self.transport.reduce_scatter(request.output, request.input, self._op(request.op))
            self._add(work, None)
            return
        device, owner = request.input.device, self.owner
        name = f"stage reduce-scatter {number}"
        sent = self.scratch.get(owner, name + " input", request.input.shape, wire.dtype, device)
        received = self.scratch.get(owner, name + " output", request.output.shape, wire.dtype, device)
        encode(request.input, sent, scale, wire)
        work = self.transport.reduce_scatter(received, sent, self._op(request.op))
        self._add(work, lambda: _copy(request.output, received))

    def _scale(self, op: str) -> float:
        return 1.0 / self.transport.world_size if op == "mean" and not self.transport.divides else 1.0

    def _op(self, op: str) -> str:
        return op if op != "mean" or self.transport.divides else "sum"

    def _add(self, work: Work, decode: Callable[[], None] | None) -> None:
        self._works.append((work, decode))


def _by_gloo(group: dist.ProcessGroup | None) -> bool:
    try:
        return "cpu:gloo" in dist.get_backend_config(group)
    except (KeyError, TypeError, ValueError):  # a group that was not made by torch.distributed
        return False


def _worth_swapping(size: int, world: int) -> bool:
    """Whether so many bytes had better be swapped than sent round a ring. Two ranks send the same number either way."""
    return world > 1 and size <= _SWAPPED and (world - 2) * size <= _SPENT


def encode(source: torch.Tensor, target: torch.Tensor, scale: float, wire: Wire | None) -> None:
    """``target = round(scale * source)`` in one pass: the scaling happens before the cast, so no value overflows
    16 bits whose average does not.
    """
    if wire is not None and wire.rounding == "stochastic":
        stochastic_round(source * scale, target)
    elif scale != 1.0 and source.dtype != target.dtype and source.device.type == "cpu":
        _scale_and_cast(source.reshape(-1), target.view(-1), scale)
    elif scale != 1.0:
        torch.mul(source, scale, out=target)
    else:
        target.copy_(source)


def _scale_and_cast(source: torch.Tensor, target: torch.Tensor, scale: float) -> None:
    """``target = round(scale * source)`` on a CPU, where ``torch.mul`` into another dtype takes twice as long as a
    product and a cast that find each other in the cache.
    """
    scaled = torch.empty(min(_BLOCK, source.numel()), dtype=source.dtype)
    for part, out in zip(source.split(_BLOCK), target.split(_BLOCK), strict=True):
        out.copy_(torch.mul(part, scale, out=scaled[: part.numel()]))


def stochastic_round(source: torch.Tensor, target: torch.Tensor) -> None:
    """Round fp32 to bf16 or fp16, up or down at random so that the expectation is the source.

    bf16 is the upper half of fp32: adding a uniform 16-bit integer to the bit pattern and truncating rounds up
    with exactly the right probability. For fp16 the same is done between the two neighbouring values.
    """
    values = source.float()
    if target.dtype == torch.bfloat16:
        bits = values.view(torch.int32)
        noise = torch.randint(0, 1 << 16, bits.shape, dtype=torch.int32, device=bits.device)
        rounded = ((bits + noise) & -65536).view(torch.float32)
        target.copy_(torch.where(torch.isfinite(values), rounded, values))
        return
    down = values.to(target.dtype)
    over = down.float() > values
    down = torch.where(over, torch.nextafter(down, torch.full_like(down, float("-inf"))), down)
    up = torch.nextafter(down, torch.full_like(down, float("inf")))
    gap = up.float() - down.float()
    chance = torch.where(gap > 0, (values - down.float()) / gap, torch.zeros_like(values))
    rounded_half = torch.where(torch.rand_like(values) < chance, up, down)
    target.copy_(torch.where(torch.isfinite(values), rounded_half, values.to(target.dtype)))


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source)
