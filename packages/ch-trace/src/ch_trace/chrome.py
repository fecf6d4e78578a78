"""Merges the parts of all ranks into one file in the Trace Event Format, which Perfetto and Chrome open.

Format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU. Each rank is a process. Its threads
are the model, the part of the critical path on this rank, and for every engine the hook, the steps, and as many lanes as
messages travel at once.
"""

import json
from collections.abc import Iterable
from importlib.metadata import version
from os import PathLike
from pathlib import Path
from typing import Any

from ch_trace.critical_path import critical_path
from ch_trace.rank_part import EnginePart, Moments, Part, Timeline
from ch_trace.recording import Message
from ch_trace.summary import summarize
from commhooks import write_whole

Event = dict[str, Any]
_MODEL, _PATH, _ENGINE = 1, 2, 100  # thread numbers: the model, the critical path, the first thread of the first engine
_HOOK, _STEPS, _LANES = 0, 1, 2  # threads of an engine, after its first


def merge(parts: "Iterable[str | PathLike[str]]", path: "str | PathLike[str]") -> Path:
    """Write one trace from the parts of several ranks, e.g. after copying them from machines without a common disk.

    Args:
        parts: files ``rank-R-of-W.TOKEN.json``, as a :class:`.Trace` leaves them if it cannot read all of them.
        path: file to write.

    Raises:
        ValueError: a file is no part, or the parts belong to different traces.
    """
    return write([Part.read(Path(one)) for one in parts], Path(path))


def write(parts: Iterable[Part], path: Path) -> Path:
    """Write the trace of some parts completely or not at all."""
    some = list(parts)
    if len({part.token for part in some}) > 1:
        raise ValueError("these parts belong to different traces: give the files that share the word before .json")
    data = trace_events(Timeline(some))
    write_whole(path, json.dumps(data, separators=(",", ":")))
    return path


def trace_events(line: Timeline) -> dict[str, Any]:
    """Return the object to write as JSON. Times are microseconds of the lowest rank's clock since the first event."""
    events: list[Event] = []
    for rank, part in line.parts.items():
        events += _Process(line, rank, part).events()
    events += _path(line)
    first = min((event["ts"] for event in events if "ts" in event), default=0.0)
    for event in events:
        if "ts" in event:  # in nanoseconds so far, which a float holds for months
            begun = round(event["ts"] - first)
            event["dur"] = (round(event["ts"] + event["dur"] - first) - begun) / 1e3
            event["ts"] = begun / 1e3
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "commhooks": version("commhooks"),
            "hook": next(iter(line.parts.values())).hook,
            "ranks": sorted(line.parts),
            "missing_ranks": next(iter(line.parts.values())).ranks - len(line.parts),
            "clocks": {
                str(rank): {"offset_s": o.seconds, "speed": o.speed, "error_bound_s": o.bound}
                for rank, o in line.offsets.items()
            },
            "dropped_events": {str(r): sum(e.dropped for e in part.engines) for r, part in line.parts.items()},
            "summary": summarize(line).to_dict(),
        },
    }


def _path(line: Timeline) -> list[Event]:
    """Return the pieces of the critical path as slices of their ranks."""
    pieces = critical_path(line)
    found = [
        _meta(what, rank, _PATH, **args)
        for rank in sorted({piece.rank for piece in pieces})
        for what, args in (("thread_name", {"name": "critical path"}), ("thread_sort_index", {"sort_index": _PATH}))
    ]
    for piece in pieces:
        name = f"{piece.kind} {piece.bucket}".strip()
        made: Event = {"name": name, "cat": "critical", "ph": "X", "pid": piece.rank, "tid": _PATH}
        begun, ended = piece.begun * 1e9, piece.ended * 1e9
        found.append({**made, "ts": begun, "dur": ended - begun, "args": {"kind": piece.kind}})
    return found


def _meta(what: str, rank: int, thread: int, /, **args: object) -> Event:
    return {"name": what, "ph": "M", "pid": rank, "tid": thread, "args": args}


class _Process:
    """Events of one rank."""

    def __init__(self, line: Timeline, rank: int, part: Part) -> None:
        self.line, self.rank, self.part = line, rank, part
        self.offset = line.offsets[rank]

    def events(self) -> list[Event]:
        part, rank = self.part, self.rank
        bound = self.offset.bound
        clock = "not aligned" if bound is None else f"± {bound * 1e6:.0f} µs"
        found = [
            self._meta(
                "process_name", 0, name=f"rank {rank} of {part.ranks} ({part.host}, pid {part.pid}, clock {clock})"
            ),
            self._meta("process_sort_index", 0, sort_index=rank),
            *self._thread(_MODEL, "model"),
        ]
        found += [self._slice(_MODEL, s.kind, "model", s.begun, s.ended) for s in part.model]
        for number, engine in enumerate(part.engines):
            found += self._engine(_ENGINE * (number + 1), engine)
        return found

    def _engine(self, base: int, engine: EnginePart) -> list[Event]:
        name = engine.name or engine.hook
        found = [*self._thread(base + _HOOK, f"{name}: hook"), *self._thread(base + _STEPS, f"{name}: steps")]
        for span in engine.spans:
            args: dict[str, Any] = {"hook": engine.hook, "step": span.step}
            if span.kind == "backward":
                thread = _MODEL if engine.during == "backward" else base + _STEPS
                found.append(self._slice(thread, engine.during, "model", span.begun, span.ended, **args))
                continue
            if span.kind == "step":
                found.append(self._slice(base + _STEPS, f"step {span.step}", "step", span.begun, span.ended, **args))
                continue
            if span.bucket:
                args |= {"stage": span.stage, **self._bucket(engine, span.bucket)}
            title = f"{span.kind} {span.bucket}".strip()
            found.append(self._slice(base + _HOOK, title, span.kind, span.begun, span.ended, **args))
        ends: list[float] = []  # of the last message in each lane
        for message, moments in self.line.moments(self.rank, engine):
            lane = next((i for i, end in enumerate(ends) if end <= moments.started), len(ends))
            if lane == len(ends):
                found += self._thread(base + _LANES + lane, f"{name}: messages {lane + 1}")
                ends.append(0.0)
            ends[lane] = moments.done
            found += self._message(base + _LANES + lane, engine, message, moments)
        return found

    def _message(self, thread: int, engine: EnginePart, message: Message, moments: Moments) -> list[Event]:
        what = ", ".join(message.buckets) if message.buckets else "status"
        args: dict[str, Any] = {
            "hook": engine.hook,
            "step": message.step,
            "stage": message.stage,
            "collective": message.kind,
            "bytes": message.nbytes,
            "wire_bytes": round(message.wire_bytes),
            "last_rank": moments.last,
            "end_known": message.done is not None,
        }
        if message.buckets:
            args |= self._bucket(engine, message.buckets[0])
        found = [self._slice(thread, f"{message.kind} {what}", "message", moments.started, moments.done, **args)]
        if moments.met > moments.started:
            found.append(self._slice(thread, f"waits for rank {moments.last}", "late", moments.started, moments.met))
        if moments.carried > moments.met:
            found.append(self._slice(thread, "queued", "queued", moments.met, moments.carried))
        if moments.arriving > moments.carried:
            found.append(self._slice(thread, "sends first", "sending", moments.carried, moments.arriving))
        if message.done is not None:
            sent = round(message.wire_bytes)
            found.append(self._slice(thread, "on the wire", "wire", moments.arriving, moments.done, bytes=sent))
        return found

    @staticmethod
    def _bucket(engine: EnginePart, label: str) -> dict[str, Any]:
        facts = engine.buckets[label]
        return {
            "bucket": label,
            "gradient_bytes": facts.gradient_bytes,
            "parameters": f"{facts.parameters[0]} … {facts.parameters[-1]}" if facts.parameters else "",
        }

    def _slice(self, thread: int, name: str, category: str, begun: float, ended: float, **args: object) -> Event:
        start, end = (self.offset(moment) * 1e9 for moment in (begun, ended))
        made: Event = {"name": name, "cat": category, "ph": "X", "pid": self.rank, "tid": thread}
        return {**made, "ts": start, "dur": max(end - start, 0.0), "args": args}

    def _thread(self, thread: int, name: str) -> list[Event]:
        return [
            self._meta("thread_name", thread, name=name),
            self._meta("thread_sort_index", thread, sort_index=thread),
        ]

    def _meta(self, what: str, thread: int, /, **args: object) -> Event:
        return _meta(what, self.rank, thread, **args)
