"""Figures of a trace: the share of messages that the backward hides, and the exposed time of each bucket."""

import textwrap
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import fmean, median
from typing import Any

from ch_core import wrapped
from ch_trace.rank_part import EnginePart, Part, Timeline
from commhooks import patterns, size

COLUMNS = 80
BELOW = 2  # lines of parameters below a bucket

Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class BucketRow:
    """One bucket, in seconds per step, as a mean over steps and ranks.

    Attributes:
        axis: axis of the engine, or empty.
        bucket: label.
        parameters: pattern of the names.
        sent_bytes: sent by this rank in one step.
        encode: time of the reduction up to its last request, including casts and the start of messages.
        wire: time of its messages on the wire. Messages that are on the wire at once share that time equally. Messages of
            several buckets count for each by its share of the bytes.
        decode: time of the reduction after its last request.
        exposed: time that the thread of the backward waited for its messages.
    """

    axis: str
    bucket: str
    parameters: str
    sent_bytes: float
    encode: float
    wire: float
    decode: float
    exposed: float

    @property
    def cost(self) -> float:
        """Seconds per step by which this bucket delays the backward."""
        return self.encode + self.decode + self.exposed


@dataclass(frozen=True, slots=True)
class Summary:
    """Figures of a trace, in seconds per step, as means over steps and ranks.

    Attributes:
        hook: expression.
        ranks: ranks whose parts were read.
        expected: number of ranks that traced.
        steps: steps of each rank that were read. The first one is left out if there are others.
        step: time from one step to the next.
        backward: time from the begin of the backward, or from the first bucket, to the end of the last one.
        wire: time in which at least one message was on the wire.
        hidden: share of ``wire`` in which the backward computed; ``None`` if nothing was sent, or ends are unknown.
        exposed: time by which the hook delays the thread of the backward: all columns of the buckets, and the status.
        waiting: part of ``exposed`` that is waiting, including the status.
        clock_error: largest error of an aligned clock in seconds; ``None`` if a rank could not be aligned.
        late_rank: rank whose messages start last on average, if that is known.
        late: seconds by which its messages start after the first rank's.
        dropped: events that the limit has dropped.
        buckets: rows by axis and label.
        during: the work that hides messages, ``"backward"`` or ``"inner steps"``. ``backward`` and ``hidden`` are about it.
    """

    hook: str
    ranks: tuple[int, ...]
    expected: int
    steps: int
    step: float
    backward: float
    wire: float
    hidden: float | None
    exposed: float
    waiting: float
    clock_error: float | None
    late_rank: int | None
    late: float
    dropped: int
    buckets: tuple[BucketRow, ...]
    during: str = "backward"

    @property
    def first(self) -> BucketRow | None:
        """The bucket to look at first, which delays the backward most."""
        return max(self.buckets, key=lambda row: row.cost, default=None)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {**asdict(self), "ranks": list(self.ranks), "buckets": [asdict(row) for row in self.buckets]}

    def __str__(self) -> str:
        return _text(self)


def summarize(parts: Iterable[Part] | Timeline) -> Summary:
    """Return the figures of the parts of one trace."""
    line = parts if isinstance(parts, Timeline) else Timeline(parts)
    whole: list[_StepFigures] = []
    periods: list[float] = []
    rows: dict[tuple[str, str], list[float]] = {}
    names: dict[tuple[str, str], str] = {}
    counts: dict[str, int] = {}
    dropped = 0
    for rank, part in line.parts.items():
        merged: dict[int, _StepFigures] = {}
        for engine in part.engines:
            dropped += engine.dropped
            steps = _whole_steps(engine)
            counts[engine.name] = counts.get(engine.name, 0) + len(steps)
            begins = [begun for begun, _ in sorted(steps.values())]
            periods += [b - a for a, b in pairwise(begins)]
            _add_buckets(line, rank, engine, steps, rows, names)
            for step, one in _steps(line, rank, engine, steps).items():
                merged.setdefault(step, _StepFigures()).add(one)
        whole += merged.values()
    table = tuple(
        BucketRow(axis, label, names[axis, label], *(value / max(counts[axis], 1) for value in sums))
        for (axis, label), sums in sorted(rows.items(), key=lambda item: (item[0][0], _order(item[0][1])))
    )
    wire = sum(one.wire for one in whole)
    late_rank, late = _late(line)
    return Summary(
        next(iter(line.parts.values())).hook,
        tuple(line.parts),
        next(iter(line.parts.values())).ranks,
        len(whole) // len(line.parts),
        median(periods) if periods else 0.0,
        _mean(one.backward for one in whole),
        wire / max(len(whole), 1),
        sum(one.hidden for one in whole) / wire if wire > 0 and all(one.known for one in whole) else None,
        _mean(one.exposed for one in whole),
        _mean(one.waiting for one in whole),
        line.bound,
        late_rank,
        late,
        dropped,
        table,
        next((engine.during for part in line.parts.values() for engine in part.engines), "backward"),
    )


@dataclass(slots=True)
class _StepFigures:
    """Figures of one step on one rank, of one engine or of several."""

    backward: float = 0.0
    wire: float = 0.0
    hidden: float = 0.0
    exposed: float = 0.0
    waiting: float = 0.0
    known: bool = True

    def add(self, other: "_StepFigures") -> None:
        self.backward = max(self.backward, other.backward)
        self.wire += other.wire
        self.hidden += other.hidden
        self.exposed += other.exposed
        self.waiting += other.waiting
        self.known &= other.known


def _whole_steps(engine: EnginePart) -> dict[int, Interval]:
    """Return begin and end of the steps that were recorded from begin to end, without the first one if there are others.

    DDP rebuilds its buckets after the first step. The limit may have dropped the begin of the oldest step.
    """
    steps = {span.step: (span.begun, span.ended) for span in engine.spans if span.kind == "step"}
    if len(steps) > 1:
        del steps[min(steps)]
    return steps


def _steps(line: Timeline, rank: int, engine: EnginePart, steps: Mapping[int, Interval]) -> dict[int, _StepFigures]:
    spans: dict[int, list[Any]] = {step: [] for step in steps}
    for span in engine.spans:
        if span.step in spans:
            spans[span.step].append(span)
    wires: dict[int, list[Interval]] = {step: [] for step in steps}
    known = dict.fromkeys(steps, True)
    for message, moments in line.moments(rank, engine):
        if message.step in wires:
            wires[message.step].append((moments.arriving, moments.done))
            known[message.step] &= message.done is not None
    found = {}
    for step, some in spans.items():
        waits = [(s.begun, s.ended) for s in some if s.kind in ("wait", "status")]
        backward = [(s.begun, s.ended) for s in some if s.kind == "backward"]
        busy = union(wires[step])
        exposed = sum(s.ended - s.begun for s in some if s.kind in ("encode", "send", "wait", "decode", "status"))
        hidden = length(minus(overlap(busy, union(backward)), union(waits)))
        found[step] = _StepFigures(
            sum(b - a for a, b in backward), length(busy), hidden, exposed, length(union(waits)), known[step]
        )
    return found


def _add_buckets(
    line: Timeline,
    rank: int,
    engine: EnginePart,
    steps: Mapping[int, Interval],
    rows: dict[tuple[str, str], list[float]],
    names: dict[tuple[str, str], str],
) -> None:
    """Add sent bytes, encode, wire, decode and exposed seconds of each bucket to ``rows``."""
    column = {"encode": 1, "send": 1, "decode": 3, "wait": 4}
    for span in engine.spans:
        if span.step in steps and span.kind in column and span.bucket:
            rows.setdefault((engine.name, span.bucket), [0.0] * 5)[column[span.kind]] += span.ended - span.begun
    some = [(message, moments) for message, moments in line.moments(rank, engine) if message.step in steps]
    times = shared([(moments.arriving, moments.done) for _, moments in some])
    for (message, _), seconds in zip(some, times, strict=True):
        for label, share in _shares(engine, message.buckets).items():
            row = rows.setdefault((engine.name, label), [0.0] * 5)
            row[0] += share * message.wire_bytes
            row[2] += share * seconds
    for label, facts in engine.buckets.items():
        names.setdefault((engine.name, label), patterns(facts.parameters))


def _shares(engine: EnginePart, labels: Sequence[str]) -> dict[str, float]:
    total = sum(engine.buckets[label].gradient_bytes for label in labels)
    return {label: engine.buckets[label].gradient_bytes / total if total else 1.0 / len(labels) for label in labels}


def _late(line: Timeline) -> tuple[int | None, float]:
    """Return the rank whose messages start last on average, and by how much after the first rank's."""
    delays: dict[int, list[float]] = {}
    for part in line.parts.values():
        for engine in part.engines:
            for message in engine.messages:
                known = line.starts(engine, message)
                if len(known) > 1:
                    first = min(known)[0]
                    delays.setdefault(part.rank, []).extend(at - first for at, rank in known if rank == part.rank)
    means = {rank: fmean(some) for rank, some in delays.items()}
    if not means or line.bound is None:
        return None, 0.0
    last = max(means, key=lambda rank: means[rank])
    return last, means[last]


def _mean(values: Iterable[float]) -> float:
    some = list(values)
    return fmean(some) if some else 0.0


def _order(label: str) -> tuple[int, ...]:
    return tuple(int(word) for word in label.split("."))


# -- intervals


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the same moments as disjoint intervals in order.

    >>> union([(3, 4), (0, 2), (1, 2.5)])
    [(0, 2.5), (3, 4)]
    """
    found: list[Interval] = []
    for begun, ended in sorted(intervals):
        if found and begun <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], ended))
        elif ended > begun:
            found.append((begun, ended))
    return found


def overlap(a: Sequence[Interval], b: Sequence[Interval]) -> list[Interval]:
    """Return the moments that are in both unions.

    >>> overlap([(0, 2), (3, 5)], [(1, 4)])
    [(1, 2), (3, 4)]
    """
    found, i, j = [], 0, 0
    while i < len(a) and j < len(b):
        begun, ended = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if begun < ended:
            found.append((begun, ended))
        i, j = (i + 1, j) if a[i][1] < b[j][1] else (i, j + 1)
    return found


def minus(a: Sequence[Interval], b: Sequence[Interval]) -> list[Interval]:
    """Return the moments of the union ``a`` that are not in the union ``b``.

    >>> minus([(0, 5)], [(1, 2), (4, 9)])
    [(0, 1), (2, 4)]
    """
    found = []
    for begun, ended in a:
        at = begun
        for low, high in b:
            if high <= at or low >= ended:
                continue
            if low > at:
                found.append((at, low))
            at = max(at, high)
        if at < ended:
            found.append((at, ended))
    return found


def shared(intervals: Sequence[Interval]) -> list[float]:
    """Return the time of each interval if those that overlap share the moments equally.

    >>> shared([(0, 4), (2, 4), (6, 7)])
    [3.0, 1.0, 1.0]
    """
    found = [0.0] * len(intervals)
    edges = sorted({edge for interval in intervals for edge in interval})
    waiting = deque(sorted(range(len(intervals)), key=lambda i: intervals[i][0]))
    running: list[int] = []
    for begun, ended in pairwise(edges):
        running = [i for i in running if intervals[i][1] > begun]
        while waiting and intervals[waiting[0]][0] <= begun:
            first = waiting.popleft()
            if intervals[first][1] > begun:
                running.append(first)
        for i in running:
            found[i] += (ended - begun) / len(running)
    return found


def length(intervals: Iterable[Interval]) -> float:
    """Return the sum of the lengths."""
    return sum(ended - begun for begun, ended in intervals)


# -- text


def _text(one: Summary) -> str:
    """Return lines of at most 80 characters. Parameters that do not fit behind their bucket stand below it."""
    ranks = f"{len(one.ranks)} of {one.expected} ranks" if len(one.ranks) < one.expected else f"{one.expected} ranks"
    error = "clocks not aligned" if one.clock_error is None else f"clocks aligned to {_time(one.clock_error)}"
    lines = wrapped(f"trace of {one.hook}: {one.steps} steps on {ranks}, {error}").splitlines()
    if one.dropped:
        lines.append(f"the limit dropped the oldest {one.dropped} events")
    period = "a step" if one.during == "backward" else "a round"
    hidden = "unknown" if one.hidden is None else f"{one.hidden:.0%}"
    lines += [
        f"{period:<12}{_time(one.step)}, of which {one.during} {_time(one.backward)}",
        f"messages    {_time(one.wire)} on the wire; hidden behind the {one.during}: {hidden}",
        f"exposed     {_time(one.exposed)} in the hook, {_time(one.waiting)} of them waiting",
        "",
        f"{'bucket':<12}{'sent':>11}{'encode':>11}{'wire':>11}{'decode':>11}{'exposed':>11}  parameters",
    ]
    for row in one.buckets:
        cells = (size(row.sent_bytes), *(_time(x) for x in (row.encode, row.wire, row.decode, row.exposed)))
        name = f"{row.axis} {row.bucket}".strip()
        line = f"{name:<12}" + "".join(f"{cell:>11}" for cell in cells)
        if len(line) + 2 + len(row.parameters) <= COLUMNS:
            lines.append(f"{line}  {row.parameters}")
        else:
            lines += [line, *_below(row.parameters)]
    if one.first is not None:
        lines += ["", *_advice(one, one.first)]
    return "\n".join(lines)


def _below(parameters: str) -> list[str]:
    """Return names in at most :data:`BELOW` lines, indented under their bucket.

    >>> _below(", ".join(f"layer.{number}.weight" for number in range(40)))[-1]
    '  layer.4.weight, layer.5.weight, layer.6.weight, layer.7.weight, ...'
    """
    return textwrap.wrap(
        parameters,
        COLUMNS,
        initial_indent="  ",
        subsequent_indent="  ",
        max_lines=BELOW,
        placeholder=" ...",
        break_on_hyphens=False,
    )


def _advice(one: Summary, row: BucketRow) -> list[str]:
    name = f"{row.axis} {row.bucket}".strip()
    lines = [f"look first at bucket {name}: it delays training by {_time(row.cost)} in a step"]
    if row.exposed >= row.encode + row.decode:
        lines.append("  most of it is waiting for messages: fewer bytes, or an earlier start, help")
    else:
        lines.append("  most of it is computing: a cheaper hook would help")
    if one.late_rank is not None and one.late > max(2 * (one.clock_error or 0.0), 0.05 * one.step):
        lines.append(f"rank {one.late_rank} is late: its messages start {_time(one.late)} after the first rank's")
    return lines


def _time(seconds: float) -> str:
    """Return a time for people.

    >>> _time(0.01234), _time(2.5), _time(42e-6)
    ('12.3 ms', '2.50 s', '42 µs')
    """
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-4 else f"{seconds * 1e6:.0f} µs"
