"""The part of a trace that one rank writes, and the moments of its messages on the clock of the lowest rank."""

import heapq
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from commhooks.trace.clocks import Offset, align
from commhooks.trace.recording import BucketFacts, Message, Span
from commhooks.transport.process_group import gather_pieces

VERSION = 1
Key = tuple[object, ...]
"""Names one message on all its ranks: axis, ranks, step and index."""

_CARRIERS = 2  # threads of a gloo group, each of which carries one message
_SENT_FIRST = {"all_to_all": 1.0, "all_gather": 0.5}
"""Share of a block, or of a piece of it, that gloo sends to a peer before it tells this peer that it can receive. A ring has
short segments."""


@dataclass(slots=True)
class EnginePart:
    """Events of one engine on one rank.

    Attributes:
        name: axis of a mesh, name of an outer optimizer's fragment, or empty.
        hook: name of the reduction.
        members: ranks of the engine's group, in order.
        dropped: number of events that the limit has dropped.
        during: the work that hides the messages of a step; its spans have the kind ``"backward"``.
        buckets: facts by label.
        spans, messages: events, oldest first.
    """

    name: str
    hook: str
    members: tuple[int, ...]
    dropped: int = 0
    during: str = "backward"
    buckets: dict[str, BucketFacts] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)

    def key(self, message: Message) -> Key:
        """Return the key of a message of this engine."""
        return (self.name, self.members, message.step, message.index)


@dataclass(slots=True)
class Part:
    """Trace of one rank. All times are seconds of its own clock.

    Attributes:
        token: names the run of the trace.
        rank: global rank.
        ranks: number of ranks that trace.
        host, pid: of the process.
        hook: expression of the handle.
        model: spans of the model's forward.
        exchanges: begin and end of each agreement that all ranks of a group made, by key.
        engines: the engines.
    """

    token: str
    rank: int
    ranks: int
    host: str
    pid: int
    hook: str
    model: list[Span] = field(default_factory=list)
    exchanges: list[tuple[str, float, float]] = field(default_factory=list)
    engines: list[EnginePart] = field(default_factory=list)

    def write(self, path: Path) -> None:
        """Write the part completely or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_name(f".{path.name}.{self.pid}")
        aside.write_text(json.dumps({"version": VERSION, **asdict(self)}, separators=(",", ":")))
        aside.replace(path)

    @classmethod
    def read(cls, path: Path) -> "Part":
        """Read a part.

        Raises:
            ValueError: the file is no part of a trace, or of another version.
        """
        data: dict[str, Any] = json.loads(path.read_text())
        if data.pop("version", None) != VERSION:
            raise ValueError(
                f"{path} is no part of a trace of this version of commhooks: trace again, or use the version that wrote it"
            )
        data["model"] = [Span(**one) for one in data["model"]]
        data["exchanges"] = [(str(key), begun, ended) for key, begun, ended in data["exchanges"]]
        data["engines"] = [_engine(one) for one in data["engines"]]
        return cls(**data)

    def times(self) -> dict[object, tuple[float, float]]:
        """Return begin and end of each message that tells something about the clocks of its ranks."""
        found: dict[object, tuple[float, float]] = {key: (begun, ended) for key, begun, ended in self.exchanges}
        for engine in self.engines:
            for message in engine.messages:
                if message.done is not None and len(engine.members) > 1 and message.scope == "all":
                    found[engine.key(message)] = (message.started, message.done)
        return found


@dataclass(frozen=True, slots=True)
class Moments:
    """Moments of one message on one rank, in seconds of the rank's own clock.

    Attributes:
        started: when the engine started it.
        met: when the last rank had started it.
        carried: when a thread of the group carried it on every rank.
        arriving: when its bytes for this rank could leave the peers. From then on it is on the wire.
        done: when its result had arrived.
        last: rank that started it last; ``None`` if the peers' traces are missing.
    """

    started: float
    met: float
    carried: float
    arriving: float
    done: float
    last: int | None


@dataclass(frozen=True, slots=True)
class _Here:
    """One message on one rank, in seconds of the lowest rank's clock."""

    rank: int
    started: float
    taken: float  # by a thread of the group
    done: float


class Timeline:
    """The parts of all ranks with aligned clocks.

    Args:
        parts: of one run, at most one of each rank.

    Attributes:
        parts: by rank.
        offsets: rank -> offset of its clock.
    """

    def __init__(self, parts: Iterable[Part]) -> None:
        self.parts = {part.rank: part for part in sorted(parts, key=lambda part: part.rank)}
        if not self.parts:
            raise ValueError("a trace needs the part of at least one rank")
        self.offsets: Mapping[int, Offset] = align({rank: part.times() for rank, part in self.parts.items()})
        self._known: dict[Key, list[_Here]] = {}  # key -> the message on each rank
        for rank, part in self.parts.items():
            for engine in part.engines:
                for message, here in _taken(rank, engine, self.offsets[rank]):
                    if message.scope == "all":
                        self._known.setdefault(engine.key(message), []).append(here)

    @property
    def bound(self) -> float | None:
        """The largest error of any aligned clock in seconds; ``None`` if a rank could not be aligned."""
        bounds = [offset.bound for offset in self.offsets.values()]
        known = [bound for bound in bounds if bound is not None]
        return max(known) if len(known) == len(bounds) else None

    def starts(self, engine: EnginePart, message: Message) -> Sequence[tuple[float, int]]:
        """Return ``(start, rank)`` of a message on all ranks, in seconds of the lowest rank's clock.

        Messages among the ranks of a node, or among peers, are not matched. For them nothing is returned.
        """
        return [(one.started, one.rank) for one in self._all(engine, message)]

    def moments(self, rank: int, engine: EnginePart) -> list[tuple[Message, Moments]]:
        """Return the messages of an engine with their moments, in the order of their starts.

        A message whose end the host did not learn ends when the engine had waited for it, or was launched.

        A message is on the wire on no rank before each rank has started it and has a free thread for it. Gloo tells a peer
        that this rank can receive behind the bytes for that peer. So the rank that takes a message last sends its first
        block, and only then do the peers' bytes for it leave, unless it has the result sooner than that allows.
        """
        offset, found = self.offsets[rank], []
        for message, here in _taken(rank, engine, offset):
            known = self._all(engine, message) or [here]
            last = max(known, key=lambda one: one.started)
            carried = max(one.taken for one in known)
            arriving = carried
            peers = [one for one in known if one.rank != rank]
            if peers and here.taken > max(one.taken for one in peers):
                alone = max(min(one.done for one in peers) - carried, 0.0)  # for the bytes of this rank
                share = _SENT_FIRST.get(message.kind, 0.0) / (len(engine.members) - 1)
                if message.kind == "all_gather":
                    share /= gather_pieces(message.nbytes, len(engine.members))
                arriving += min(share * alone, max(here.done - carried - alone, 0.0))
            shift = message.started - here.started
            times = [message.started]
            for moment in (last.started, carried, arriving):
                times.append(min(max(moment + shift, times[-1]), here.done + shift))
            begun, met, carried, arriving = times
            slowest = last.rank if len(known) > 1 else None
            found.append((message, Moments(begun, met, carried, arriving, here.done + shift, slowest)))
        return found

    def _all(self, engine: EnginePart, message: Message) -> list[_Here]:
        return self._known[engine.key(message)] if message.scope == "all" else []


def _taken(rank: int, engine: EnginePart, offset: Offset) -> list[tuple[Message, _Here]]:
    """Return the messages of an engine in the order of their starts, with the time when a thread of their group was free."""
    free: dict[str, list[float]] = {}
    found = []
    for message in sorted(engine.messages, key=lambda one: one.started):
        threads = free.setdefault(message.scope, [float("-inf")] * _CARRIERS)
        done = offset(message.done or message.waited or message.launched)
        started = offset(message.started)
        taken = max(started, heapq.heappop(threads))
        heapq.heappush(threads, done)
        found.append((message, _Here(rank, started, taken, done)))
    return found


def _engine(data: dict[str, Any]) -> EnginePart:
    data["members"] = tuple(data["members"])
    data["buckets"] = {
        label: BucketFacts(tuple(b["parameters"]), b["gradient_bytes"]) for label, b in data["buckets"].items()
    }
    data["spans"] = [Span(**one) for one in data["spans"]]
    data["messages"] = [Message(**{**one, "buckets": tuple(one["buckets"])}) for one in data["messages"]]
    return EnginePart(**data)
