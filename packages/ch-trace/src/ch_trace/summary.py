"""Figures of a trace: the share of messages that the backward hides, the critical path, and the times of each bucket."""

import textwrap
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from statistics import fmean, median
from typing import Any

from ch_core import wrapped
from ch_trace.critical_path import BACKWARD, HOOK, KINDS, LINK, critical_path, waited_for
from ch_trace.rank_part import EnginePart, Part, Timeline
from commhooks import duration, patterns, size

WIDTH = 80
COLUMNS = ("sent", "encode", "wire", "decode", "exposed", "critical")
IGNORED = 0.05  # of the critical path: less than that is worth no change
SHORT_BYTES = 32_000  # a message of fewer bytes travels as long as an empty one on most links between machines
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
        critical: time of its messages and of its code on the critical path.
    """

    axis: str
    bucket: str
    parameters: str
    sent_bytes: float
    encode: float
    wire: float
    decode: float
    exposed: float
    critical: float = 0.0

    @property
    def name(self) -> str:
        """Axis and label."""
        return f"{self.axis} {self.bucket}".strip()

    @property
    def cells(self) -> list[str]:
        """Bytes and times for people, under :data:`COLUMNS`."""
        times = (self.encode, self.wire, self.decode, self.exposed, self.critical)
        return [size(self.sent_bytes), *map(duration, times)]


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
        late_rank: rank for which the others wait longest until it starts its messages, if that is known.
        late: seconds in which another rank waits for that.
        dropped: events that the limit has dropped.
        buckets: rows by axis and label.
        during: the work that hides messages, ``"backward"`` or ``"inner steps"``. ``backward`` and ``hidden`` are about it.
        critical: time of each kind of work on the critical path, see :data:`ch_trace.critical_path.KINDS`. Empty if the ends
            of messages are unknown.
        advice: one sentence that says what to change.
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
    critical: Mapping[str, float] = field(default_factory=dict)
    advice: str = ""

    @property
    def recorded(self) -> str:
        """Steps, ranks and clocks for people."""
        ranks = f"{len(self.ranks)} of " if len(self.ranks) < self.expected else ""
        clocks = "not aligned" if self.clock_error is None else f"aligned to {duration(self.clock_error)}"
        return f"{self.steps} steps on {ranks}{self.expected} ranks, clocks {clocks}"

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {**asdict(self), "ranks": list(self.ranks), "buckets": [asdict(row) for row in self.buckets]}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Summary":
        """Return the summary of :meth:`to_dict`."""
        return cls(**{**data, "ranks": tuple(data["ranks"]), "buckets": tuple(BucketRow(**r) for r in data["buckets"])})

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
    path = _Path.of(line)
    table = tuple(
        BucketRow(
            *(axis, label, names[axis, label]),
            *[*(value / max(counts[axis], 1) for value in sums), path.buckets.get(f"{axis} {label}".strip(), 0.0)],
        )
        for (axis, label), sums in sorted(rows.items(), key=lambda item: (item[0][0], _order(item[0][1])))
    )
    wire = sum(one.wire for one in whole)
    late_rank, late = _late(line, len(whole) // len(line.parts))
    during = next((engine.during for part in line.parts.values() for engine in part.engines), "backward")
    bound = line.bound
    # Clocks may be wrong by the bound, so a smaller delay is no finding.
    delay = (late_rank, late) if late_rank is not None and late > 2 * (bound or 0.0) else None
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
        bound,
        late_rank,
        late,
        dropped,
        table,
        during,
        path.kinds,
        _advice(path, table, delay, during),
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


@dataclass(frozen=True, slots=True)
class _Path:
    """The critical path, in seconds per step.

    Attributes:
        kinds: time of each kind. Empty if the path is unknown.
        buckets: time of the messages and of the code of each bucket, by axis and label.
        message_bytes: mean bytes that a rank sends for a message of the path.
        unknown: sentence that says why the path is unknown; otherwise empty.
    """

    kinds: Mapping[str, float] = field(default_factory=dict)
    buckets: Mapping[str, float] = field(default_factory=dict)
    message_bytes: float = 0.0
    unknown: str = ""

    @classmethod
    def of(cls, line: Timeline) -> "_Path":
        pieces, edges = critical_path(line), _edges(line)
        if not edges:
            return cls(unknown="No step was recorded, so there is no critical path.")
        steps = len(edges) - 1
        inside = [piece for piece in pieces if piece.ended > edges[0] and piece.begun < edges[-1]]
        if not inside:
            return cls(
                unknown="The host does not learn when messages end, so the critical path is unknown. Use torch.profiler."
            )
        kinds, buckets = dict.fromkeys(KINDS, 0.0), dict[str, float]()
        for piece in inside:
            seconds = (min(piece.ended, edges[-1]) - max(piece.begun, edges[0])) / steps
            kinds[piece.kind] += seconds
            if piece.bucket:
                buckets[piece.bucket] = buckets.get(piece.bucket, 0.0) + seconds
        return cls(kinds, buckets, _mean(piece.sent_bytes for piece in inside if piece.kind == LINK))


def _edges(line: Timeline) -> list[float]:
    """Return the ends of the lowest rank's steps, in seconds of its clock. If there is one step, also its begin."""
    engines = next(iter(line.parts.values())).engines
    steps = sorted((s.begun, s.ended) for engine in engines[:1] for s in engine.spans if s.kind == "step")
    return [*steps[0]] if len(steps) == 1 else [ended for _, ended in steps]


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


def _late(line: Timeline, steps: int) -> tuple[int | None, float]:
    """Return the rank for which the others wait longest until it starts its messages, and the seconds in a step."""
    waited = waited_for(line)
    if not waited or line.bound is None:
        return None, 0.0
    last = max(waited, key=lambda rank: waited[rank])
    return last, waited[last] / max(len(line.parts) - 1, 1) / max(steps, 1)


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
    lines = wrapped(f"trace of {one.hook}: {one.recorded}").splitlines()
    if one.dropped:
        lines.append(f"the limit dropped the oldest {one.dropped} events")
    period = "a step" if one.during == "backward" else "a round"
    hidden = "unknown" if one.hidden is None else f"{one.hidden:.0%}"
    lines += [
        f"{period:<12}{duration(one.step)}, of which {one.during} {duration(one.backward)}",
        f"messages    {duration(one.wire)} on the wire; hidden behind the {one.during}: {hidden}",
        f"exposed     {duration(one.exposed)} in the hook, {duration(one.waiting)} of them waiting",
    ]
    if one.critical:
        total = sum(one.critical.values())
        names = {**dict.fromkeys(KINDS), BACKWARD: one.during}
        shares = (f"{names[kind] or kind} {one.critical[kind] / total:.0%}" for kind in KINDS)
        lines.append(f"critical    {duration(total)}: {', '.join(shares)}")
    lines += ["", f"{'bucket':<12}" + "".join(f"{name:>9}" for name in COLUMNS) + "  parameters"]
    for row in one.buckets:
        line = f"{row.name:<12}" + "".join(f"{cell:>9}" for cell in row.cells)
        if len(line) + 2 + len(row.parameters) <= WIDTH:
            lines.append(f"{line}  {row.parameters}")
        else:
            lines += [line, *_below(row.parameters)]
    if one.advice:
        lines += ["", *wrapped(one.advice).splitlines()]
    return "\n".join(lines)


def _below(parameters: str) -> list[str]:
    """Return names in at most :data:`BELOW` lines, indented under their bucket.

    >>> _below(", ".join(f"layer.{number}.weight" for number in range(40)))[-1]
    '  layer.4.weight, layer.5.weight, layer.6.weight, layer.7.weight, ...'
    """
    return textwrap.wrap(
        parameters,
        WIDTH,
        initial_indent="  ",
        subsequent_indent="  ",
        max_lines=BELOW,
        placeholder=" ...",
        break_on_hyphens=False,
    )


def _advice(path: _Path, buckets: Sequence[BucketRow], late: tuple[int, float] | None, during: str = "backward") -> str:
    """Return the sentence that says what to change, about the largest part of the critical path that can change.

    Args:
        path: the critical path.
        buckets: rows of the table.
        late: a rank for which others wait until it starts its messages, and the seconds.
        during: the work that hides the messages.
    """
    if path.unknown:
        return path.unknown
    total, link, hook = sum(path.kinds.values()), path.kinds[LINK], path.kinds[HOOK]
    delay = late[1] if late is not None else 0.0
    first = max(buckets, key=lambda row: row.critical, default=None)
    most = f"; bucket {first.name} has the most of it" if first is not None and len(buckets) > 1 else ""

    def share(seconds: float) -> str:
        return f"{seconds / total:.0%} of the critical path, on average {duration(seconds)} in a step"

    if max(link, hook, delay) < IGNORED * total:
        return (
            f"Leave the hook as it is: link and hook are {(link + hook) / total:.0%} of the critical path, and the rest is the "
            "script's own work."
        )
    if late is not None and delay > max(link, hook):
        return (
            f"Look at rank {late[0]}: other ranks wait {duration(delay)} in a step until it starts its messages. Compare "
            "its data loading, and the other programs on its machine."
        )
    if hook > link:
        return f"Take a cheaper hook: its computation is {share(hook)}{most}."
    if path.message_bytes < SHORT_BYTES:
        return (
            f"Send fewer messages: the link is {share(link)}, and a message has "
            f"{size(path.message_bytes)}, so its time is the link's round trip. Take a hook with fewer rounds, or "
            "attach(link=) if the ranks are far apart."
        )
    return f"Send fewer bytes, or start the messages earlier in the {during}: the link is {share(link)}{most}."
