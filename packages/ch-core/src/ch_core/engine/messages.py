"""The messages of an engine: requests of buckets are collected, merged, cut, started, counted and completed here.

A :class:`Messenger` is the only way from an engine to its transport. All transports share its rules. A :class:`Batch` is a
set of requests that travel together, and a :class:`Message` one of its messages. :class:`.CpuTuning` has the sizes at which a
message changes its way; this file asks for them.
"""

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import Any, Protocol, cast

import torch

from ch_core.bucket import Bucket
from ch_core.engine.schedule import TUNED, BucketPlan, CpuTuning
from ch_core.engine.stats import Counters
from ch_core.requests import AllGather, AllReduce, AllToAll, ReduceScatter, Request, Scope
from ch_core.rounding import encode
from ch_core.scratch import Scratch
from ch_core.transport.base import LeveledTransport, SeveralWorks, Transport, Work, has_ended
from ch_core.transport.completion import call_on_arrival, is_lost
from ch_core.transport.loan import Loan, take_back

Decode = Callable[[], None] | None

_OFF: AbstractContextManager[Any] = nullcontext()
# Private, and only asked if a profiler runs. Without it every range is recorded, which costs time but no correctness.
_on_this_thread = getattr(torch.autograd, "_profiler_enabled", lambda: True)


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
        self._decoded.wait()  # the work ends before its callback has decoded
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
            # The current stream waits, not the host. Without it the next step could write too early.
            with suppress(Exception):  # a lost group raises
                work.wait(None)
            return None
        return None if has_ended(work) else self._loan

    def _finish(self) -> None:
        if self._decode is not None:
            self._decode()
        if self._loan is not None:
            self._loan.receive()


class Asks(Protocol):
    """A bucket whose reduction asks for requests."""

    number: int
    bucket: Bucket
    plan: BucketPlan
    stage: int
    pending: "Batch | None"


class Batch:
    """Requests that travel together: first collected, then in flight, then complete.

    They are the requests of one stage of one or several buckets, or an engine's own. All-reduces of equal dtype, op, wire and
    scope become one message.

    Args:
        messenger: carries the batch.
        own: requests that belong to no bucket, such as the status.

    Attributes:
        members: ``(number, bucket, stage)`` of each bucket that has requests in the batch.
        first_bytes: payload bytes of first stages of the members.
        reduced: tensors that hold reduced numbers after :meth:`wait`.
        error: first exception of an ``on_sent`` of a request.
    """

    __slots__ = (
        "_any_order",
        "_between_bytes",
        "_messages",
        "_messenger",
        "_newest",
        "_owner",
        "_requests",
        "_scratch",
        "_wire_bytes",
        "error",
        "first_bytes",
        "members",
        "reduced",
    )

    def __init__(self, messenger: "Messenger", *own: Request) -> None:
        self._messenger, self._scratch = messenger, messenger.scratch
        self._owner: object = "status"  # key of the memory for merged and cast tensors
        self._any_order = True  # True if ranks may add unrounded numbers in another order than DDP does
        self._newest = True  # True if no message of a later bucket needs gloo's threads before this batch is done
        self._requests = list(own)
        self._messages: list[Message] = []
        # Modelled bytes that this rank sends, and the part that leaves its node. A ring sends 2 (W - 1) / W of an all-reduce,
        # and (W - 1) / W of any other collective. A direct exchange sends everything to W - 1 ranks.
        self._wire_bytes = self._between_bytes = 0.0
        self.members: list[tuple[int, Bucket, int]] = []
        self.first_bytes = 0
        self.reduced: list[torch.Tensor] = []
        self.error: BaseException | None = None

    # -- collected

    def add(self, run: Asks, requests: tuple[Request, ...]) -> None:
        """Add the requests of a bucket's next stage, and count them."""
        plan, stage = run.plan, run.stage
        if not self.members:
            self._owner = run.number, stage
        self.members.append((run.number, run.bucket, stage))
        run.stage, run.pending = stage + 1, self
        self._requests.extend(requests)
        self._newest = run.bucket.is_last
        # The average of a bucket with one stage equals DDP's to the bit, so near ranks add in DDP's order.
        self._any_order = self._any_order and (not plan.one_stage or self._messenger.tuning.link is not None)
        self.first_bytes += plan.first_bytes
        traffic, (payload, trips) = self._messenger.counters.traffic, plan.volumes[stage]
        traffic.payload_bytes += payload
        traffic.trip_bytes += trips

    @property
    def worth_a_message(self) -> bool:
        """True if these first stages need not be kept until more of them travel together."""
        return self.first_bytes >= self._messenger.tuning.coalesced_bytes

    # -- in flight

    def start(self) -> None:
        """Encode (scale by 1/W, cast, merge) and start all requests, and count their bytes."""
        requests, self._requests = self._requests, []
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
        traffic = self._messenger.counters.traffic
        traffic.wire_bytes += self._wire_bytes
        traffic.between_bytes += self._between_bytes

    def wait(self, timeout: float | None) -> None:
        """Wait for every message and write the results into the tensors of the requests."""
        for message in self._messages:
            message.wait(self._messenger.tuning, timeout)
        self._messages.clear()
        self._messenger.in_flight.discard(self)

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
        tensor, wire, transport = first.tensor, first.wire, self._among(first.scope)
        scale = _scale(first.op, transport)
        if len(group) == 1 and wire is None:
            self.reduced.append(tensor)
            if first.sent is not None:
                first.sent.copy_(tensor)
            self._report_sent(first)  # before this scales the tensor and sends it
            if scale != 1.0:
                tensor.mul_(scale)
            self._reduce(number, tensor.view(-1), first, transport, None)
            return
        total = sum(r.tensor.numel() for r in group)
        dtype = wire.dtype if wire is not None else tensor.dtype
        merged = self._scratch.get(self._owner, f"all-reduce {number}", (total,), dtype, tensor.device)
        tensors = [r.tensor.view(-1) for r in group]
        parts = list(torch.split_with_sizes(merged, [t.numel() for t in tensors]))
        if wire is None:
            # Private: one launch for all parts. copy_ of each does the same, slower.
            torch._foreach_copy_(parts, tensors)
            if scale != 1.0:
                merged.mul_(scale)
        else:
            for source, part in zip(tensors, parts, strict=True):
                encode(source, part, scale)
        for request, part in zip(group, parts, strict=True):
            if request.sent is not None:
                request.sent.copy_(part.view(request.sent.shape)).mul_(1.0 / scale)
        self.reduced.append(merged)  # one sum then checks all requests for NaN and Inf
        self._reduce(number, merged, first, transport, lambda: torch._foreach_copy_(tensors, parts))
        for request in group:
            self._report_sent(request)  # while the message travels; `wait` alone writes results

    def _report_sent(self, request: AllReduce) -> None:
        if request.on_sent is not None:
            try:
                request.on_sent()
            except BaseException as error:  # raised here, it would keep peers waiting for this rank's message
                self.error = self.error or error

    def _reduce(self, number: int, flat: torch.Tensor, like: AllReduce, transport: Transport, decode: Decode) -> None:
        """Start an all-reduce of a flat tensor in the cheapest way that the transport allows.

        With more than two ranks, the way decides the order of addition. Numbers that no cast has rounded then go DDP's way,
        so that the average equals DDP's to the bit, unless all buckets of the batch permit any order.
        """
        size, op, tuning = flat.nbytes, _sum(like.op), self._messenger.tuning
        halved = False
        if transport.free and flat.is_cpu and (self._any_order or transport.world_size == 2 or like.wire is not None):
            if op == "sum" and flat.is_floating_point() and tuning.direct(size, transport.world_size):
                self._exchange_directly(number, flat, transport, like.scope, decode)
                return
            halved = self._newest and size >= tuning.halved_from
        self._count(2 * size, transport, like.scope, ring=True)
        loan = Loan(flat) if decode is None else None  # merged tensors are scratch, which a dropped step leaves
        sent = flat if loan is None else loan.message
        if halved:
            # One work for both halves. With two, the second half's arrival could decode the first before it is there.
            work: Work = SeveralWorks([transport.all_reduce(half, op) for half in sent.chunk(2)])
        else:
            work = transport.all_reduce(sent, op)
        self._messages.append(Message(work, flat, decode, loan))

    def _exchange_directly(
        self, number: int, flat: torch.Tensor, transport: Transport, scope: Scope, decode: Decode
    ) -> None:
        """All-reduce few numbers in one message: send them to all ranks, and add the received rows in rank order."""
        shape = (transport.world_size, flat.numel())
        sent, received = (
            self._scratch.get(self._owner, f"{what} {number}", shape, flat.dtype, flat.device)
            for what in ("sent", "received")
        )
        sent.copy_(flat)

        def add_rows() -> None:
            # In the same order on all ranks. In another one their averages would differ in the last bit.
            first, second, *others = received.unbind(0)
            torch.add(first, second, out=flat)
            for row in others:
                flat.add_(row)
            if decode is not None:
                decode()

        self._count(sent.nbytes, transport, scope)
        work = transport.all_to_all(received.view(-1), sent.view(-1))
        self._messages.append(Message(work, received, add_rows))

    def _sparse(self, request: AllReduce) -> None:
        transport = self._among(request.scope)
        if _scale(request.op, transport) != 1.0:
            request.tensor.div_(transport.world_size)  # DDP divides sparse gradients; dense ones it scales by 1/W
        # gloo and NCCL gather indices and values
        nbytes = transport.world_size * (request.tensor._indices().nbytes + request.tensor._values().nbytes)
        self._count(nbytes, transport, request.scope, ring=True)
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
            name, device = f"{request.kind} {number}", sent.device
            sent = self._scratch.get(self._owner, name + " input", sent.shape, wire.dtype, device)
            received = self._scratch.get(self._owner, name + " output", received.shape, wire.dtype, device)
            encode(request.input, sent, 1.0)
            decode = partial(_copy, request.output, received)
        if request.sent is not None:
            request.sent.copy_(sent)
        gathers = request.kind == "all_gather"
        self._count((received if gathers else sent).nbytes, self._among(request.scope), request.scope, ring=gathers)
        self._messages.append(Message(collective(received, sent), received, decode, loan))

    def _reduce_scatter(self, number: int, request: ReduceScatter) -> None:
        wire, transport = request.wire, self._among(request.scope)
        scale = _scale(request.op, transport)
        self.reduced.append(request.output)
        if wire is None:
            if scale != 1.0:
                request.input.mul_(scale)
            self._count(request.input.nbytes, transport, request.scope, ring=True)
            loan = Loan(request.output)
            work = transport.reduce_scatter(loan.message, request.input, _sum(request.op))
            self._messages.append(Message(work, request.output, None, loan))
            return
        device, name = request.input.device, f"reduce-scatter {number}"
        sent = self._scratch.get(self._owner, name + " input", request.input.shape, wire.dtype, device)
        received = self._scratch.get(self._owner, name + " output", request.output.shape, wire.dtype, device)
        encode(request.input, sent, scale)
        self._count(sent.nbytes, transport, request.scope, ring=True)
        work = transport.reduce_scatter(received, sent, _sum(request.op))
        self._messages.append(Message(work, received, partial(_copy, request.output, received)))

    def _among(self, scope: Scope) -> Transport:
        """Return the transport among the ranks of a scope."""
        transport = self._messenger.transport
        if scope == "all":
            return transport
        return cast(LeveledTransport, transport).scoped(scope)  # Schedule.open_levels has checked it

    def _count(self, nbytes: int, transport: Transport, scope: Scope, *, ring: bool = False) -> None:
        """Count a message whose parts for all ranks have ``nbytes``. A rank does not send its own part."""
        world, whole = transport.world_size, self._messenger.transport
        sent = nbytes * (world - 1) / world
        self._wire_bytes += sent
        topology = getattr(whole, "topology", None)
        if topology is not None and scope != "node":
            ring = ring and transport.link is None  # far ranks send to each other directly
            self._between_bytes += sent * topology.leaving(whole.rank, scope, ring=ring)


def _scale(op: str, transport: Transport) -> float:
    return 1.0 / transport.world_size if op == "mean" else 1.0


def _sum(op: str) -> str:
    """Return the op for the transport. A mean was divided before, so that a sum of 16-bit numbers cannot overflow."""
    return "sum" if op == "mean" else op


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source)


class Messenger:
    """Carries the requests of one engine over its transport, and owns the memory of its messages until they end.

    Args:
        transport: carries the messages.
        counters: counters of the engine.
        timeout: seconds that one collective may take on the host.
        tuning: decides how messages of a CPU are sent.
        name: of the reduction, for the profiler.

    Attributes:
        scratch: memory for merged and cast tensors, and of the reduction.
        device: device of the last bucket.
        in_flight: batches that have started and have not ended.
    """

    def __init__(
        self,
        transport: Transport,
        counters: Counters,
        timeout: float | None = None,
        tuning: CpuTuning = TUNED,
        name: str = "",
    ) -> None:
        self.transport, self.counters, self.timeout, self.tuning, self.name = transport, counters, timeout, tuning, name
        self.scratch = Scratch()
        self.device = torch.device("cpu")
        self.in_flight: set[Batch] = set()

    def start(self, batch: Batch) -> None:
        """Start a batch with requests of buckets."""
        begun = time.perf_counter()
        counters, members = self.counters, batch.members
        counters.traffic.rounds += bool(batch._requests)
        if counters.trace is not None:
            counters.trace.sending(members)
        self.in_flight.add(batch)
        with profiled(self.name, "start", members[0][2] + 1):
            batch.start()
        ended = time.perf_counter()
        counters.encode_seconds += ended - begun
        if counters.trace is not None:
            counters.trace.started(begun, ended)

    def post(self, *requests: Request) -> Batch:
        """Start requests that belong to no bucket, such as the status."""
        batch = Batch(self, *requests)
        self.in_flight.add(batch)
        batch.start()
        return batch

    def carry_out(self, *requests: Request) -> None:
        """Start requests that belong to no bucket and wait for them."""
        batch = self.post(*requests)
        batch.wait(self.timeout)
        if batch.error is not None:  # only now, because the collectives write to memory of this step
            raise batch.error

    def gather(self, mine: torch.Tensor) -> torch.Tensor:
        """Return every rank's ``mine``, shape (n,), as rows of (world_size, n) on the CPU."""
        mine = mine.to(self.device)
        rows = mine.new_empty(self.transport.world_size * mine.numel())
        self.carry_out(AllGather(mine, rows))
        return rows.view(self.transport.world_size, -1).cpu()

    def drop(self) -> None:
        """Drop all messages in flight. The transport may still write to their memory, so later steps use other memory."""
        take_back(loan for batch in self.in_flight for loan in batch.drop())
        self.in_flight.clear()
        self.scratch = Scratch()


def profiled(reduction: str, what: str, stage: int) -> AbstractContextManager[Any]:
    """Return the profiler range ``commhooks::REDUCTION::WHATn``.

    Without a profiler it returns an empty context, because an unused ``record_function`` costs more than the start of a
    collective.
    """
    on_any_thread = getattr(torch.autograd.profiler, "_is_profiler_enabled", False)  # private, as above
    on = on_any_thread or _on_this_thread()
    return torch.profiler.record_function(f"commhooks::{reduction}::{what}{stage}") if on else _OFF
