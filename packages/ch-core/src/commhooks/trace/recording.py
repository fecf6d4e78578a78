"""Records the work of one engine on this rank: computation, waits and messages.

All times are seconds of ``time.perf_counter()`` of this process. :mod:`commhooks.trace.clocks` aligns the ranks.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from commhooks.bucket import Bucket
from commhooks.engine.engine import Engine
from commhooks.engine.schedule import TUNED
from commhooks.transport.arrival import call_on_arrival
from commhooks.transport.base import Transport, Work

STATUS = "status"
# The engine spins for results up to this size. A callback would need the interpreter's lock on gloo's thread before torch
# counts the message as done, so each spin would last to its limit.
POLLED_BYTES = TUNED.spin_bytes


@dataclass(slots=True)
class Span:
    """Time that the thread of the backward spent on one thing.

    Attributes:
        kind: ``"encode"``, ``"send"``, ``"wait"``, ``"decode"``, ``"status"``, ``"step"``, ``"forward"`` or ``"backward"``.
        step: number of the engine's step.
        bucket: label of the bucket; empty if there is none.
        stage: stage of the bucket's reduction.
        begun, ended: seconds.
    """

    kind: str
    step: int
    bucket: str
    stage: int
    begun: float
    ended: float


@dataclass(slots=True)
class Message:
    """One collective on this rank.

    Attributes:
        kind: ``"all_reduce"``, ``"all_gather"``, ``"all_to_all"`` or ``"reduce_scatter"``.
        step: number of the engine's step.
        index: number of the message in its step. Step and index are equal on all ranks of the engine.
        buckets: labels of the buckets that it carries. Empty for a message of the engine itself, such as the status.
        stage: stage of the first bucket.
        nbytes: bytes of the tensor that the engine gave to the transport.
        wire_bytes: bytes that this rank sends, if an all-reduce goes round a ring.
        scope: ranks that exchange it, see :class:`~commhooks.requests.AllReduce`.
        started: seconds when the engine called the transport.
        launched: seconds when this call returned.
        done: seconds when the result had arrived, or for a result of up to 1 MiB when the trace saw that first, at its next
            event or while the engine waits; ``None`` if the host does not learn it, as on a GPU.
        waited: seconds when a wait for it returned; ``None`` if the engine never waited.
    """

    kind: str
    step: int
    index: int
    buckets: tuple[str, ...]
    stage: int
    nbytes: int
    wire_bytes: float
    scope: str
    started: float
    launched: float = 0.0
    done: float | None = None
    waited: float | None = None


@dataclass(slots=True)
class BucketFacts:
    """A bucket of a traced engine, by its label.

    Attributes:
        parameters: names, in the order of the bucket.
        gradient_bytes: of its gradients.
    """

    parameters: tuple[str, ...]
    gradient_bytes: int


class EngineTrace:
    """Records one engine. It is a :class:`.StepTrace`.

    Args:
        engine: the engine.
        limit: number of events to keep. The oldest are dropped.
        backward_begun: returns the seconds at which the running backward began, once; ``None`` if that is unknown.
        during: the work that hides the messages of a step: ``"backward"``, or ``"inner steps"`` of an outer optimizer.

    Attributes:
        events: newest events.
        buckets: label -> facts.
        recorded: number of events so far, dropped ones included.
    """

    def __init__(
        self,
        engine: Engine,
        limit: int,
        backward_begun: Callable[[], float | None] = lambda: None,
        during: str = "backward",
    ) -> None:
        self.engine, self.during = engine, during
        self.events: deque[Span | Message] = deque(maxlen=limit)
        self.buckets: dict[str, BucketFacts] = {}
        self.recorded = 0
        self._backward_begun = backward_begun
        self._step = -1  # messages before the first step
        self._index = 0
        self._labels: dict[int, str] = {}  # number of a run -> label of its bucket
        self._seen: set[str] = set()  # labels of this step
        self._sending: tuple[tuple[str, ...], int] = ((), 0)
        self._begun: float | None = None  # of the running step
        self._polled: list[PolledWork] = []  # works whose end was not seen yet
        engine.counters.trace = self
        self._wrap()

    @property
    def dropped(self) -> int:
        """Number of events that the limit has dropped."""
        return self.recorded - len(self.events)

    def close(self) -> None:
        """Stop recording. The events stay."""
        engine = self.engine
        if engine.counters.trace is self:
            engine.counters.trace = None
            sends = engine.sender.transport
            if isinstance(sends, TracedTransport):
                engine.sender.transport = sends.inside

    # -- calls of the engine

    def begin(self, step: int) -> None:
        self._step, self._index, self._begun = step, 0, time.perf_counter()
        self._seen.clear()
        self._labels.clear()
        self._sending = ((), 0)
        self._wrap()

    def computed(self, number: int, bucket: Bucket, stage: int, begun: float, ended: float, *, decode: bool) -> None:
        if stage == 0:
            self._name(number, bucket)
        self._add(Span("decode" if decode else "encode", self._step, self._label(number, bucket), stage, begun, ended))

    def waited(self, number: int, bucket: Bucket, stage: int, begun: float, ended: float) -> None:
        self._add(Span("wait", self._step, self._label(number, bucket), stage, begun, ended))

    def sending(self, runs: Sequence[tuple[int, Bucket, int]]) -> None:
        self._sending = (tuple(self._label(number, bucket) for number, bucket, _ in runs), runs[0][2] if runs else 0)

    def started(self, begun: float, ended: float) -> None:
        labels, stage = self._sending
        self._sending = ((), 0)
        self._add(Span("send", self._step, labels[0] if labels else "", stage, begun, ended))

    def finishing(self, at: float) -> None:
        begun = self._backward_begun()
        if begun is None:
            begun = self._begun
        if begun is not None:
            self._add(Span("backward", self._step, "", 0, begun, at))

    def agreed(self, begun: float, ended: float) -> None:
        self._add(Span(STATUS, self._step, "", 0, begun, ended))

    def end(self) -> None:
        if self._begun is not None:
            self._add(Span("step", self._step, "", 0, self._begun, time.perf_counter()))
            self._begun = None

    # -- calls of the transport

    def message(self, kind: str, given: torch.Tensor, received: torch.Tensor, world: int, scope: str) -> Message:
        """Record a message that the engine starts now."""
        largest = max(_nbytes(given), _nbytes(received))
        passes = 2 if kind == "all_reduce" else 1
        labels, stage = self._sending
        made = Message(
            kind,
            self._step,
            self._index,
            labels,
            stage,
            _nbytes(given),
            passes * largest * (world - 1) / world,
            scope,
            time.perf_counter(),
        )
        self._index += 1
        self._add(made)
        return made

    # -- parts

    def _wrap(self) -> None:
        """Time the messages of the engine's transport. A move to another group replaces the transport."""
        sender = self.engine.sender
        if not isinstance(sender.transport, TracedTransport):
            sender.transport = TracedTransport(sender.transport, self)

    def poll(self, work: "PolledWork") -> None:
        """Look for the end of a work at each event, until it is seen."""
        self._polled.append(work)

    def _add(self, event: Span | Message) -> None:
        self.events.append(event)
        self.recorded += 1
        if self._polled:
            self._polled = [work for work in self._polled if not work.is_seen()]

    def _name(self, number: int, bucket: Bucket) -> None:
        """Give a run the index of its bucket as label, and pieces of one bucket a number, too."""
        base = label = str(bucket.index)
        piece = 0
        while label in self._seen:
            piece += 1
            label = f"{base}.{piece}"
        self._seen.add(label)
        self._labels[number] = label
        known = self.buckets.get(label)
        size = bucket.layout.size * bucket.dtype.itemsize
        if known is None or len(known.parameters) != len(bucket.layout.params) or known.gradient_bytes != size:
            self.buckets[label] = BucketFacts(tuple(p.name for p in bucket.layout.params), size)

    def _label(self, number: int, bucket: Bucket) -> str:
        if number not in self._labels:  # its reduction raised before its first request
            self._name(number, bucket)
        return self._labels[number]


class TracedTransport:
    """Times the collectives of a transport. Other attributes are those of the transport inside.

    Args:
        inside: the transport.
        trace: receives the messages.
        scope: ranks of the transport.
    """

    def __init__(self, inside: Transport, trace: EngineTrace, scope: str = "all") -> None:
        self.inside, self._trace, self._scope = inside, trace, scope
        self.rank, self.world_size = inside.rank, inside.world_size
        self.free, self.elastic = inside.free, inside.elastic

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inside, name)

    def all_reduce(self, tensor: torch.Tensor, op: str) -> Work:
        message = self._message("all_reduce", tensor, tensor)
        return self._traced(self.inside.all_reduce(tensor, op), message, tensor)

    def all_gather(self, output: torch.Tensor, input: torch.Tensor) -> Work:
        message = self._message("all_gather", input, output)
        return self._traced(self.inside.all_gather(output, input), message, output)

    def all_to_all(self, output: torch.Tensor, input: torch.Tensor) -> Work:
        message = self._message("all_to_all", input, output)
        return self._traced(self.inside.all_to_all(output, input), message, output)

    def reduce_scatter(self, output: torch.Tensor, input: torch.Tensor, op: str) -> Work:
        message = self._message("reduce_scatter", input, output)
        return self._traced(self.inside.reduce_scatter(output, input, op), message, output)

    def abort(self) -> None:
        self.inside.abort()

    # -- of a LeveledTransport, whose check at run time does not see __getattr__

    @property
    def topology(self) -> Any:
        return getattr(self.inside, "topology", None)

    def open_levels(self, nodes: Any, timeout: float | None) -> None:
        inside: Any = self.inside
        inside.open_levels(nodes, timeout)

    def scoped(self, scope: Any) -> Transport:
        inside: Any = self.inside
        return TracedTransport(inside.scoped(scope), self._trace, scope)

    def _message(self, kind: str, given: torch.Tensor, received: torch.Tensor) -> Message:
        return self._trace.message(kind, given, received, self.world_size, self._scope)

    def _traced(self, work: Work, message: Message, output: torch.Tensor) -> Work:
        message.launched = time.perf_counter()
        if not output.is_cpu:  # the host does not learn the end: a future completes when the kernel is queued
            return TracedWork(work, message, False)
        if hasattr(work, "is_completed") and _nbytes(output) <= POLLED_BYTES:
            polled = PolledWork(work, message, True)
            self._trace.poll(polled)
            return polled
        future = getattr(work, "future", None)
        if future is not None:

            def arrived(_: object) -> None:
                if message.done is None:
                    message.done = time.perf_counter()

            call_on_arrival(future(), arrived)
        return TracedWork(work, message, True)


class TracedWork:
    """A collective whose end is recorded. Other attributes are those of the work inside."""

    __slots__ = ("_inside", "_message", "_on_host")

    def __init__(self, inside: Work, message: Message, on_host: bool) -> None:
        self._inside, self._message, self._on_host = inside, message, on_host

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inside, name)

    def wait(self, timeout: float | None) -> None:
        """See :meth:`.Work.wait`."""
        self._inside.wait(timeout)
        message = self._message
        message.waited = time.perf_counter()
        if self._on_host and message.done is None:
            message.done = message.waited


class PolledWork(TracedWork):
    """A collective on the host that can be asked if it is done."""

    __slots__ = ()

    def is_seen(self) -> bool:
        """True if the end is recorded."""
        return self._message.done is not None or self.is_completed()

    def is_completed(self) -> bool:
        """True if the work is done."""
        inside: Any = self._inside
        done: bool = inside.is_completed()
        if done and self._message.done is None:
            self._message.done = time.perf_counter()
        return done


def _nbytes(tensor: torch.Tensor) -> int:
    if tensor.is_sparse:
        return int(tensor._indices().nbytes + tensor._values().nbytes)
    return tensor.nbytes
