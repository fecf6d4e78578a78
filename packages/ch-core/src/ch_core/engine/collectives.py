"""Starts requests on a transport, waits for them and decodes results. All transports share these rules.

:class:`Stage` is one batch of requests in flight, and :class:`Message` one of its messages. :class:`Sender` is the only way from
an engine to its transport. :func:`void_requests` makes the requests of a failed reduction, so that no peer waits for them.
"""

import math
import threading
from collections.abc import Callable, Hashable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch

from ch_core.bucket import BucketLayout
from ch_core.engine.schedule import TUNED, BucketPlan, CpuTuning
from ch_core.engine.stats import Counters
from ch_core.reduction import Reduction, StepContext
from ch_core.requests import AllGather, AllReduce, AllToAll, ReduceScatter, Request, Scope, StagePlan
from ch_core.rounding import encode
from ch_core.scratch import Scratch
from ch_core.topology import Topology
from ch_core.transport.base import LeveledTransport, SeveralWorks, Transport, Work, has_ended
from ch_core.transport.completion import call_on_arrival, is_lost
from ch_core.transport.loan import Loan

Decode = Callable[[], None] | None


class Message:
    """One request in flight, or several merged ones. It completes once, and its result is decoded once.

    Args:
        work: completes after all collectives that carry the message.
        output: receives the result.
        decode: writes the result to the tensors of the requests; ``None`` if it is there.
        loan: memory of a request that the collective writes to in place; ``None`` if the message has its own memory.
    """

    __slots__ = ("_decode", "_decoded", "_dropped", "_error", "_loan", "_lock", "_output", "_work")

    def __init__(self, work: Work, output: torch.Tensor, decode: Decode, loan: Loan | None = None) -> None:
        self._work: Any = work
        self._output, self._decode, self._loan = output, decode, loan
        self._decoded: threading.Event | None = None  # set by the thread that receives the result, if it decodes
        self._error: BaseException | None = None
        self._lock, self._dropped = threading.Lock(), False

    def wait(self, tuning: CpuTuning, timeout: float | None) -> None:
        """Wait for the result and decode it."""
        tuning.wait(self._work, self._output, timeout)
        if self._decoded is None:
            self._finish()
            return
        self._decoded.wait()
        if self._error is not None:
            raise self._error

    def decode_on_arrival(self, action: Callable[[], None]) -> None:
        """Decode on the thread that receives the result, then call ``action``. A lost result is not decoded."""
        self._decoded = decoded = threading.Event()

        def arrived(future: Any) -> None:
            try:
                with self._lock, torch.no_grad():  # the thread that receives would record gradients
                    if not self._dropped and not is_lost(future):
                        self._finish()
            except BaseException as error:
                self._error = error
            decoded.set()
            action()

        call_on_arrival(self._work.future(), arrived)

    def drop(self) -> Loan | None:
        """Decode nothing from now on. Return the loan if the collective may still write to it."""
        with self._lock:  # the receiving thread may be decoding
            self._dropped = True
        work, self._work = self._work, None  # a work refers to its callback, which refers to this message
        if not self._output.is_cpu:
            with suppress(Exception):  # a lost group raises
                work.wait(None)  # the current stream waits, not the host
            return None
        return None if has_ended(work) else self._loan

    def _finish(self) -> None:
        if self._decode is not None:
            self._decode()
        if self._loan is not None:
            self._loan.receive()


@dataclass(slots=True)
class Stage:
    """One batch of requests in flight.

    :meth:`start` encodes (scales by 1/W, casts, merges) and starts the collectives. :meth:`wait` waits and decodes.
    All-reduces of equal dtype, op and wire become one message.

    Attributes:
        transport: carries the messages.
        scratch: provides memory for merged and cast tensors.
        owner: key of that memory.
        any_order: True if ranks may add unrounded numbers in another order than DDP does.
        tuning: decides how messages are sent.
        newest: True if no message of a later bucket needs gloo's threads before this one is done.
        reduced: tensors that hold reduced numbers after :meth:`wait`.
        wire_bytes: modelled bytes that this rank sends. A ring sends ``2 (W - 1) / W`` of an all-reduce, and
            ``(W - 1) / W`` of any other collective. A direct exchange sends everything to ``W - 1`` ranks.
        between_bytes: the part of them that leaves this rank's node, if the topology is known.
        error: first exception of an ``on_sent`` of a request.
    """

    transport: Transport
    scratch: Scratch
    owner: object
    any_order: bool = False
    tuning: CpuTuning = TUNED
    newest: bool = True
    _messages: list[Message] = field(default_factory=list)
    reduced: list[torch.Tensor] = field(default_factory=list)
    wire_bytes: float = 0.0
    between_bytes: float = 0.0
    error: BaseException | None = None

    def start(self, requests: tuple[Request, ...]) -> "Stage":
        """Encode and start all requests."""
        groups: dict[object, list[AllReduce]] = {}
        for number, request in enumerate(requests):
            if isinstance(request, AllReduce):
                if request.tensor.is_sparse:
                    self._sparse(request)
                elif request.tensor.numel():
                    key = (request.tensor.dtype, request.op, request.wire, request.scope)
                    groups.setdefault(key, []).append(request)
            elif isinstance(request, AllGather):
                self._move(number, request, self._among(request.scope).all_gather)
            elif isinstance(request, AllToAll):
                self._move(number, request, self._among(request.scope).all_to_all)
            else:
                self._reduce_scatter(number, request)
        for number, group in enumerate(groups.values()):
            self._all_reduce(number, group)
        return self

    def wait(self, timeout: float | None) -> None:
        """Wait for every message and write the results into the tensors of the requests."""
        for message in self._messages:
            message.wait(self.tuning, timeout)
        self._messages.clear()

    def on_decoded(self, action: Callable[[], None]) -> None:
        """Decode each result as soon as it arrives, and call ``action`` after the last one.

        Both happen on the threads that receive the results. :meth:`wait` then only waits for them. A lost result counts as
        arrived, so ``action`` is always called.
        """
        if not self._messages:  # an empty bucket
            action()
        left, lock = len(self._messages), threading.Lock()

        def count_down() -> None:
            nonlocal left
            with lock:
                left -= 1
                last = left == 0
            if last:
                action()

        for message in self._messages:
            message.decode_on_arrival(count_down)

    def drop(self) -> list[Loan]:
        """Decode nothing from now on. Return the memory of requests that messages in flight may still write to."""
        loans = [message.drop() for message in self._messages]
        self._messages.clear()
        return [loan for loan in loans if loan is not None]

    # -- all-reduce

    def _all_reduce(self, number: int, group: list[AllReduce]) -> None:
        first = group[0]
        tensor, wire = first.tensor, first.wire
        scale = self._scale(first.op, first.scope)
        if len(group) == 1 and wire is None:
            self.reduced.append(tensor)
            if first.sent is not None:
                first.sent.copy_(tensor)
            self._report_sent(first)  # before this scales the tensor and sends it
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
        self.reduced.append(merged)  # one sum then checks all requests for NaN and Inf
        self._reduce(number, merged, first, lambda: torch._foreach_copy_(tensors, parts))
        for request in group:
            self._report_sent(request)  # while the message travels; `wait` alone writes results

    def _report_sent(self, request: AllReduce) -> None:
        if request.on_sent is not None:
            try:
                request.on_sent()
            except BaseException as error:  # raised here, it would keep peers waiting for this rank's message
                self.error = self.error or error

    def _reduce(self, number: int, flat: torch.Tensor, like: AllReduce, decode: Decode) -> None:
        """Start an all-reduce of a flat tensor in the cheapest way that the transport allows.

        With more than two ranks, the way decides the order of addition. Numbers that no cast has rounded then go DDP's way,
        so that the average equals DDP's to the bit, unless ``any_order`` permits another.
        """
        size, op, transport = flat.nbytes, _sum(like.op), self._among(like.scope)
        free = transport.free and flat.is_cpu
        halved = False
        if free and (self.any_order or transport.world_size == 2 or like.wire is not None):
            if op == "sum" and flat.is_floating_point() and self.tuning.direct(size, transport.world_size):
                self._exchange_directly(number, flat, decode, like.scope)
                return
            halved = self.newest and size >= self.tuning.halved_from
        self._count(2 * size, like.scope, ring=True)
        loan = Loan(flat) if decode is None else None  # merged tensors are scratch, which a dropped step leaves
        sent = flat if loan is None else loan.message
        if halved:
            work: Work = SeveralWorks([transport.all_reduce(half, op) for half in sent.chunk(2)])
        else:
            work = transport.all_reduce(sent, op)
        self._messages.append(Message(work, flat, decode, loan))

    def _exchange_directly(self, number: int, flat: torch.Tensor, decode: Decode, scope: Scope) -> None:
        """All-reduce few numbers in one message: send them to all ranks, and add the received rows in rank order."""
        transport = self._among(scope)
        shape = (transport.world_size, flat.numel())
        sent, received = (
            self.scratch.get(self.owner, f"stage {what} {number}", shape, flat.dtype, flat.device)
            for what in ("sent", "received")
        )
        sent.copy_(flat)

        def add_rows() -> None:
            first, second, *others = received.unbind(0)
            torch.add(first, second, out=flat)
            for row in others:
                flat.add_(row)
            if decode is not None:
                decode()

        self._count(sent.nbytes, scope)
        work = transport.all_to_all(received.view(-1), sent.view(-1))
        self._messages.append(Message(work, received, add_rows))

    def _sparse(self, request: AllReduce) -> None:
        transport = self._among(request.scope)
        if self._scale(request.op, request.scope) != 1.0:
            request.tensor.div_(transport.world_size)  # DDP divides sparse gradients; dense ones it scales by 1/W
        # gloo and NCCL gather indices and values
        nbytes = transport.world_size * (request.tensor._indices().nbytes + request.tensor._values().nbytes)
        self._count(nbytes, request.scope, ring=True)
        # gloo replaces the indices and values of the tensor that it gets. A dropped message must not do so later.
        received = request.tensor.detach()
        work = transport.all_reduce(received, _sum(request.op))
        self._messages.append(Message(work, received, partial(_copy, request.tensor, received)))

    # -- the other collectives

    def _move(
        self, number: int, request: AllGather | AllToAll, collective: Callable[[torch.Tensor, torch.Tensor], Work]
    ) -> None:
        """Start a collective that only moves numbers, cast to the wire's dtype if the request names one."""
        sent, received, wire = request.input, request.output, request.wire
        decode: Decode = None
        loan: Loan | None = None
        if wire is None:
            loan = Loan(received)
            received = loan.message
        else:
            name, device = f"stage {request.kind} {number}", sent.device
            sent = self.scratch.get(self.owner, name + " input", sent.shape, wire.dtype, device)
            received = self.scratch.get(self.owner, name + " output", received.shape, wire.dtype, device)
            encode(request.input, sent, 1.0, wire)
            decode = partial(_copy, request.output, received)
        if request.sent is not None:
            request.sent.copy_(sent)
        gathers = request.kind == "all_gather"
        self._count((received if gathers else sent).nbytes, request.scope, ring=gathers)
        self._messages.append(Message(collective(received, sent), received, decode, loan))

    def _reduce_scatter(self, number: int, request: ReduceScatter) -> None:
        scale, wire, transport = self._scale(request.op, request.scope), request.wire, self._among(request.scope)
        self.reduced.append(request.output)
        if wire is None:
            if scale != 1.0:
                request.input.mul_(scale)
            self._count(request.input.nbytes, request.scope, ring=True)
            loan = Loan(request.output)
            work = transport.reduce_scatter(loan.message, request.input, _sum(request.op))
            self._messages.append(Message(work, request.output, None, loan))
            return
        device, owner = request.input.device, self.owner
        name = f"stage reduce-scatter {number}"
        sent = self.scratch.get(owner, name + " input", request.input.shape, wire.dtype, device)
        received = self.scratch.get(owner, name + " output", request.output.shape, wire.dtype, device)
        encode(request.input, sent, scale, wire)
        self._count(sent.nbytes, request.scope, ring=True)
        work = transport.reduce_scatter(received, sent, _sum(request.op))
        self._messages.append(Message(work, received, partial(_copy, request.output, received)))

    def _among(self, scope: Scope) -> Transport:
        """Return the transport among the ranks of a scope."""
        if scope == "all":
            return self.transport
        return cast(LeveledTransport, self.transport).scoped(scope)  # Engine.open_levels has checked it

    def _scale(self, op: str, scope: Scope) -> float:
        return 1.0 / self._among(scope).world_size if op == "mean" else 1.0

    def _count(self, nbytes: int, scope: Scope, *, ring: bool = False) -> None:
        """Count a message whose parts for all ranks have ``nbytes``. A rank does not send its own part."""
        transport = self._among(scope)
        world = transport.world_size
        sent = nbytes * (world - 1) / world
        self.wire_bytes += sent
        topology = getattr(self.transport, "topology", None)
        if topology is not None and scope != "node":
            self.between_bytes += sent * topology.leaving(self.transport.rank, scope, ring=ring)


def _sum(op: str) -> str:
    """Return the op for the transport. A mean was divided before, so that a sum of 16-bit numbers cannot overflow."""
    return "sum" if op == "mean" else op


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source)


# -- the way from an engine to its transport


class Sender:
    """Starts stages and an engine's own messages on a transport, and caches plans.

    Args:
        transport: carries the messages.
        counters: counters of the engine.
        timeout: seconds that one collective may take on the host.
        tuning: decides how messages of a CPU are sent.

    Attributes:
        scratch: memory for merged and cast tensors.
        device: device of the last bucket.
    """

    def __init__(
        self, transport: Transport, counters: Counters, timeout: float | None, tuning: CpuTuning = TUNED
    ) -> None:
        self.transport, self.counters, self.timeout, self.tuning = transport, counters, timeout, tuning
        self.scratch = Scratch()
        self.device = torch.device("cpu")
        self._plans: dict[tuple[BucketLayout, int, Hashable], BucketPlan] = {}

    @property
    def topology(self) -> Topology | None:
        """The nodes of the ranks, if the transport knows them."""
        found: Topology | None = getattr(self.transport, "topology", None)
        return found

    def plan_of(self, reduction: Reduction, layout: BucketLayout, ctx: StepContext) -> BucketPlan:
        """Return the plan of buckets with this layout at this step.

        With two levels, ranks of one node may plan different requests to their peers. How messages are sent must not differ
        in a node, so it follows from the plans of all its ranks.
        """
        key = (layout, ctx.world_size, reduction.phase(ctx.step))  # a manager changes the number of ranks
        if key not in self._plans:
            own = reduction.plan(layout, ctx)
            others = [reduction.plan(layout, one) for one in ctx.places() if one.rank != ctx.rank]
            self._plans[key] = BucketPlan(own, layout, self.tuning, others, ctx.size("node"))
        return self._plans[key]

    def post(self, request: Request) -> Stage:
        """Start a message of the engine itself."""
        stage = Stage(self.transport, self.scratch, "status", True, self.tuning).start((request,))
        self.counters.traffic.sent(stage.wire_bytes, stage.between_bytes)
        return stage

    def carry_out(self, request: Request) -> None:
        """Start a message of the engine itself and wait for it."""
        self.post(request).wait(self.timeout)

    def gather(self, mine: torch.Tensor) -> torch.Tensor:
        """Return every rank's ``mine``, shape (n,), as rows of (world_size, n) on the CPU."""
        mine = mine.to(self.device)
        rows = mine.new_empty(self.transport.world_size * mine.numel())
        self.carry_out(AllGather(mine, rows))
        return rows.view(self.transport.world_size, -1).cpu()

    def move(self, transport: Transport) -> None:
        """Use another group of ranks."""
        self.transport = transport
        self._plans.clear()  # they may depend on the number of ranks

    def forget(self) -> None:
        """Replace the scratch memory. The transport may still write to the old tensors of an abandoned step."""
        self.scratch = Scratch()


# -- requests of a failed reduction


def void_requests(
    planned: StagePlan, world_size: int, device: torch.device, topology: Topology | None = None
) -> tuple[Request, ...]:
    """Return the requests of one stage of a failed reduction, filled with NaN.

    Their results are invalid on all ranks. On a GPU the ranks learn of the failure only after the optimizer's step. Until
    then NaN makes a ``GradScaler`` skip it. Integers and packed bytes become zeros.

    Example:
        >>> from ch_core import RequestPlan
        >>> void_requests((RequestPlan("all_reduce", 2, torch.float32),), 2, torch.device("cpu"))[0].tensor
        tensor([nan, nan])
        >>> void_requests((RequestPlan("all_gather", 4, torch.uint8),), 2, torch.device("cpu"))[0].input
        tensor([0, 0], dtype=torch.uint8)
    """
    made: list[Request] = []
    for p in planned:
        void = torch.zeros(p.numel, dtype=p.dtype, device=device)
        fill_nan(void)
        part = p.numel // (world_size if topology is None else topology.size(p.scope))
        if p.kind == "all_reduce":
            made.append(AllReduce(void, p.op, p.wire, scope=p.scope))
        elif p.kind == "reduce_scatter":
            made.append(ReduceScatter(void, void[:part].clone(), p.op, p.wire, p.scope))
        elif p.kind == "all_gather":
            made.append(AllGather(void[:part].clone(), void, wire=p.wire, scope=p.scope))
        else:
            made.append(AllToAll(void, torch.empty_like(void), wire=p.wire, scope=p.scope))
    return tuple(made)


def fill_nan(tensor: torch.Tensor) -> None:
    """Fill a tensor with NaN, if its dtype has NaN."""
    if tensor.is_sparse:
        tensor.mul_(math.nan)
    elif tensor.is_floating_point() or tensor.is_complex():
        tensor.fill_(math.nan)
