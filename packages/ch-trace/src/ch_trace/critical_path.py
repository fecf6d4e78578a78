"""The critical path of a trace: the computation and the messages that decide when the steps end.

The search goes back from the last event. A wait ended because a message arrived. So the path takes the time of the message
instead of the wait, and continues at the message's begin on the rank that started it last. Between two such waits, the path
is what the thread of that rank computed. No rank ends sooner unless something on the path becomes shorter.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from ch_trace.clocks import Offset
from ch_trace.rank_part import EnginePart, Moments, Part, Timeline
from ch_trace.recording import Message, Span

LINK, HOOK, BACKWARD, FORWARD, REST = KINDS = ("link", "hook", "backward", "forward", "rest")
"""Kinds of pieces: messages, computation of the hook, the model's backward (of an outer optimizer, its inner steps) and
forward, and everything else, such as the optimizer and the data loading."""

_WAITS = ("wait", "status")
_OF_HOOK = ("encode", "send", "decode", *_WAITS)


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of the path, in seconds of the lowest rank's clock.

    Attributes:
        kind: one of :data:`KINDS`.
        rank: rank that computed. Of a message, the rank that waited for it.
        bucket: axis and label of the bucket; empty if there is none.
        sent_bytes: bytes that the rank sent for a message.
    """

    kind: str
    rank: int
    bucket: str
    begun: float
    ended: float
    sent_bytes: float = 0.0


def critical_path(line: Timeline) -> list[Piece]:
    """Return the pieces of the path in the order of time. Empty if the end of a message is unknown, as on a GPU."""
    engines = [engine for part in line.parts.values() for engine in part.engines]
    if any(message.done is None for engine in engines for message in engine.messages):
        return []
    ranks = {rank: _Rank(line, rank, part) for rank, part in line.parts.items()}
    now, rank = max((here.end, rank) for rank, here in ranks.items())
    found: list[Piece] = []
    while True:
        here = ranks[rank]
        wait = here.wait_before(now)
        found += reversed(here.work(wait.ended if wait is not None else here.begin, now))
        if wait is None:
            return [piece for piece in reversed(found) if piece.ended > piece.begun]
        # From the arrival of the message to the end of the wait, the thread wakes up.
        found.append(Piece(HOOK, rank, wait.bucket, wait.done, wait.ended))
        found.append(Piece(LINK, rank, wait.bucket, wait.met, wait.done, wait.sent_bytes))
        now = wait.met
        rank = wait.last if wait.last in ranks else rank


def waited_for(line: Timeline) -> dict[int, float]:
    """Return for each rank the seconds in which all other ranks waited until it started a message."""
    found: dict[int, float] = {}
    for rank, part in line.parts.items():
        for engine in part.engines:
            for wait in _waits(engine, line.moments(rank, engine), line.offsets[rank]):
                if wait.last is not None and wait.last != rank:
                    found[wait.last] = found.get(wait.last, 0.0) + max(0.0, wait.met - wait.begun)
    return found


def by_step(pieces: Iterable[tuple[str, float, float]], edges: Sequence[float]) -> list[dict[str, float]]:
    """Return the time of each kind between any two edges.

    Args:
        pieces: kind, begin and end, in order, without overlap.
        edges: the ends of the steps, in order.

    Example:
        >>> by_step([("link", 0.0, 4.0), ("hook", 4.0, 5.0)], [1.0, 3.0, 5.0])
        [{'link': 2.0}, {'link': 1.0, 'hook': 1.0}]
    """
    found: list[dict[str, float]] = [{} for _ in pairwise(edges)]
    for kind, begun, ended in pieces:
        for number in range(max(bisect_right(edges, begun) - 1, 0), len(found)):
            if edges[number] >= ended:
                break
            inside = min(ended, edges[number + 1]) - max(begun, edges[number])
            found[number][kind] = found[number].get(kind, 0.0) + inside
    return found


@dataclass(frozen=True, slots=True)
class _Wait:
    """A wait that the arrival of a message ended, in seconds of the lowest rank's clock.

    Attributes:
        begun, ended: of the wait.
        bucket: that waited.
        met, done, last, sent_bytes: of the message, see :class:`.Moments`.
    """

    begun: float
    ended: float
    bucket: str
    met: float
    done: float
    last: int | None
    sent_bytes: float


@dataclass(slots=True)
class _Rank:
    """What one rank did: its waits for messages, and the kind of work at each moment.

    Attributes:
        begin, end: of all events.
        waits: in the order of their ends.
        busy: begin, end, kind and bucket of disjoint intervals, in order. Between them is :data:`REST`.
    """

    line: Timeline
    rank: int
    part: Part
    begin: float = 0.0
    end: float = 0.0
    waits: list[_Wait] = field(default_factory=list)
    busy: list[tuple[float, float, str, str]] = field(default_factory=list)
    _ends: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        offset = self.line.offsets[self.rank]
        spans = [(FORWARD, "", offset(span.begun), offset(span.ended)) for span in self.part.model]
        for engine in self.part.engines:
            for span in engine.spans:
                kind = BACKWARD if span.kind == "backward" else HOOK if span.kind in _OF_HOOK else None
                if kind is not None:
                    spans.append((kind, _name(engine, span), offset(span.begun), offset(span.ended)))
            self.waits += _waits(engine, self.line.moments(self.rank, engine), offset)
        self.waits.sort(key=lambda wait: wait.ended)
        self._ends = [wait.ended for wait in self.waits]
        self.busy = painted(spans)
        every = [*self.part.model, *(span for engine in self.part.engines for span in engine.spans)]
        self.begin = offset(min((span.begun for span in every), default=0.0))
        self.end = offset(max((span.ended for span in every), default=0.0))

    def wait_before(self, now: float) -> _Wait | None:
        """Return the last wait that a message ended before ``now``."""
        at = bisect_left(self._ends, now)
        return self.waits[at - 1] if at else None

    def work(self, begun: float, ended: float) -> list[Piece]:
        """Return the work of this rank between two moments."""
        found, at = [], begun
        first = bisect_right(self.busy, begun, key=lambda one: one[1])
        for number in range(first, len(self.busy)):
            low, high, kind, bucket = self.busy[number]
            if low >= ended:
                break
            if low > at:
                found.append(Piece(REST, self.rank, "", at, low))
            found.append(Piece(kind, self.rank, bucket, max(low, at), min(high, ended)))
            at = found[-1].ended
        if at < ended:
            found.append(Piece(REST, self.rank, "", at, ended))
        return found


def _name(engine: EnginePart, span: Span) -> str:
    return f"{engine.name} {span.bucket}".strip() if span.bucket else ""


def _waits(engine: EnginePart, messages: Sequence[tuple[Message, Moments]], offset: Offset) -> list[_Wait]:
    """Return the waits of an engine in which a message arrived, each with the last such message of its bucket."""
    steps: dict[int, list[tuple[Message, Moments]]] = {}
    for message, moments in sorted(messages, key=lambda one: one[1].done):
        steps.setdefault(message.step, []).append((message, moments))
    found = []
    for span in engine.spans:
        if span.kind not in _WAITS:
            continue
        arrived = [one for one in steps.get(span.step, []) if span.begun < one[1].done <= span.ended]
        own = [one for one in arrived if span.bucket in one[0].buckets or not (span.bucket or one[0].buckets)]
        if arrived:
            message, moments = (own or arrived)[-1]
            wait, times = (offset(span.begun), offset(span.ended)), (offset(moments.met), offset(moments.done))
            found.append(_Wait(*wait, _name(engine, span), *times, moments.last, message.wire_bytes))
    return found


def painted(spans: Iterable[tuple[str, str, float, float]]) -> list[tuple[float, float, str, str]]:
    """Return disjoint intervals. Where spans overlap, the kind that comes first in :data:`KINDS` wins.

    Args:
        spans: kind, bucket, begin and end.

    Example:
        >>> painted([("backward", "", 0.0, 5.0), ("hook", "3", 1.0, 2.0)])
        [(0.0, 1.0, 'backward', ''), (1.0, 2.0, 'hook', '3'), (2.0, 5.0, 'backward', '')]
    """
    some = list(spans)
    edges = sorted((at, number) for number, span in enumerate(some) for at in span[2:] if span[3] > span[2])
    found: list[tuple[float, float, str, str]] = []
    running: set[int] = set()
    before = 0.0
    for at, number in edges:
        if running and at > before:
            kind, bucket, _, _ = some[min(running, key=lambda one: KINDS.index(some[one][0]))]
            if found and found[-1][1:] == (before, kind, bucket):
                found[-1] = (found[-1][0], at, kind, bucket)
            else:
                found.append((before, at, kind, bucket))
        running ^= {number}
        before = at
    return found
