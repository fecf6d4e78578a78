"""Records the work of one engine on this rank: computation, waits and messages.

All times are seconds of ``time.perf_counter()`` of this process. :mod:`ch_trace.clocks` aligns the ranks.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ch_core import TUNED, Engine, Transport, Work, call_on_arrival, is_lost
from commhooks import Bucket

STATUS = "status"
# The engine spins for results up to this size and for this long. A callback would need the interpreter's lock on gloo's thread
# before torch counts the message as done, so each spin would last to its limit.
POLLED_BYTES, POLLED_SECONDS = TUNED.spin_bytes, TUNED.spin_seconds


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
        scope: ranks that exchange it, see :class:`~ch_core.requests.AllReduce`.
        started: seconds when the engine called the transport.
        launched: seconds when this call returned.
        done: seconds when the result had arrived. For a result of up to 1 MiB, within the first 2 ms, the time when the trace saw
            that first, at its next event or in a wait. ``None`` if the message failed, or the host does not learn its end, as on
            a GPU.
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
        self.stop_polling()
        self._polled.clear()  # works keep their tensors alive
        engine = self.engine
        if engine.counters.trace is self:
            engine.counters.trace = None
            sends = engine.messenger.transport
            if isinstance(sends, TracedTransport):
                engine.messenger.transport = sends.inside

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
        messenger = self.engine.messenger
        if not isinstance(messenger.transport, TracedTransport):
            messenger.transport = TracedTransport(messenger.transport, self)

    def poll(self, work: "PolledWork") -> None:
        """Look for the end of a work at each event."""
        self._polled.append(work)

    def stop_polling(self) -> None:
        """Let callbacks record the ends of the polled works, because this thread now waits without events."""
        self._polled = [work for work in self._polled if work.needs_polling(waiting=True)]

    def _add(self, event: Span | Message) -> None:
        self.events.append(event)
        self.recorded += 1
        if self._polled:
            self._polled = [work for work in self._polled if work.needs_polling()]

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
        self.free, self.elastic, self.link = inside.free, inside.elastic, inside.link

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

    @property
    def exchanged(self) -> int:
        return self.inside.exchanged

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
            return TracedWork(work, message, None)
        if self.link is not None:  # only its wait writes the output, so it is complete from the start for those who ask
            return TracedWork(work, message, self._trace)
        if hasattr(work, "is_completed") and _nbytes(output) <= POLLED_BYTES:
            polled = PolledWork(work, message, self._trace)
            self._trace.poll(polled)
            return polled
        traced = TracedWork(work, message, self._trace)
        traced.call_on_end()
        return traced


class TracedWork:
    """A collective whose end is recorded. Other attributes are those of the work inside.

    Args:
        inside: the work.
        message: receives the end.
        trace: of the engine, if the host learns the end.
    """

    __slots__ = ("_inside", "_message", "_trace")

    def __init__(self, inside: Work, message: Message, trace: EngineTrace | None) -> None:
        self._inside, self._message, self._trace = inside, message, trace

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inside, name)

    def wait(self, timeout: float | None) -> None:
        """See :meth:`.Work.wait`."""
        inside: Any = self._inside
        if self._trace is not None and hasattr(inside, "is_completed") and not inside.is_completed():
            self._trace.stop_polling()
        inside.wait(timeout)
        message = self._message
        message.waited = time.perf_counter()
        if self._trace is not None and message.done is None:
            message.done = message.waited

    def call_on_end(self) -> bool:
        """Record the end in a callback on the thread that receives the result. Return False if the work has no future."""
        future = getattr(self._inside, "future", None)
        if future is None:
            return False
        call_on_arrival(future(), partial(_note_end, self._message))
        return True


class PolledWork(TracedWork):
    """A short collective on the host. The trace asks if it is done, and uses a callback if it takes longer than a spin."""

    __slots__ = ()

    def needs_polling(self, *, waiting: bool = False) -> bool:
        """False if the end is recorded, or a callback will record it.

        Args:
            waiting: True if no event follows soon.
        """
        if self._message.done is not None or self.is_completed():
            return False
        if not waiting and time.perf_counter() - self._message.launched < POLLED_SECONDS:
            return True
        return not self.call_on_end()

    def is_completed(self) -> bool:
        """True if the work is done."""
        inside: Any = self._inside
        done: bool = inside.is_completed()
        if done and self._message.done is None:
            future = getattr(inside, "future", None)
            _note_end(self._message, future() if future is not None else None)
        return done


def _note_end(message: Message, future: Any) -> None:
    """Record the end of a message, unless it failed.

    A message may fail on one rank before another rank begins it. Such an end would misalign the clocks.

    Args:
        message: receives the end.
        future: of its work, completed; ``None`` if there is none.
    """
    now = time.perf_counter()
    if message.done is None and not (future is not None and is_lost(future)):
        message.done = now


def _nbytes(tensor: torch.Tensor) -> int:
    if tensor.is_sparse:
        return int(tensor._indices().nbytes + tensor._values().nbytes)
    return tensor.nbytes
