"""The part of a trace that one rank writes, and the moments of its messages on the clock of the lowest rank."""

import heapq
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ch_core import gather_pieces
from ch_trace.clocks import Offset, align
from ch_trace.recording import BucketFacts, Message, Span
from commhooks import write_whole

VERSION = 1
Key = tuple[object, ...]
"""Names one message on all its ranks: axis, ranks, step and index."""

_CARRIERS = 2  # threads of a gloo group, each of which carries one message
_SENT_FIRST = {"all_to_all": 1.0, "all_gather": 0.5}
"""Share of a block, or of a piece of it, that gloo sends to a peer at once, and before it tells this peer that it can receive.
A ring has short segments."""


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
        write_whole(path, json.dumps({"version": VERSION, **asdict(self)}, separators=(",", ":")))

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


@dataclass(slots=True)
class _Here:
    """One message on one rank, in seconds of the lowest rank's clock."""

    started: float
    taken: float  # by a thread of the group
    done: float
    arriving: float  # when the first bytes for this rank could leave a peer


@dataclass(slots=True)
class _Shared:
    """One message on all ranks that have traced it."""

    message: Message  # on one of them
    ranks: dict[int, _Here] = field(default_factory=dict)
    last: int = 0  # rank that started it last
    taken: float = 0.0  # by the first rank
    carried: float = 0.0  # when the last rank had taken it
    done: float = 0.0  # on the last rank

    def compare(self) -> None:
        """Compare the ranks, once all of them are known."""
        all_ranks = self.ranks.values()
        self.last = max(self.ranks, key=lambda rank: self.ranks[rank].started)
        self.taken, self.carried = min(here.taken for here in all_ranks), max(here.taken for here in all_ranks)
        self.done = max(here.done for here in all_ranks)


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
        self._known: dict[Key, _Shared] = {}
        together: dict[tuple[str, tuple[int, ...]], list[_Shared]] = {}  # the messages of each engine
        for rank, part in self.parts.items():
            for engine in part.engines:
                for message, here in _taken(engine, self.offsets[rank]):
                    if message.scope == "all":
                        key = engine.key(message)
                        if key not in self._known:
                            self._known[key] = _Shared(message)
                            together.setdefault((engine.name, engine.members), []).append(self._known[key])
                        self._known[key].ranks[rank] = here
        for (_, members), messages in together.items():
            for shared in messages:
                shared.compare()
            _let_arrive(messages, len(members))

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
        if message.scope != "all":
            return []
        return [(one.started, rank) for rank, one in self._known[engine.key(message)].ranks.items()]

    def moments(self, rank: int, engine: EnginePart) -> list[tuple[Message, Moments]]:
        """Return the messages of an engine with their moments, in the order of their starts.

        A message whose end the host did not learn ends when the engine had waited for it, or was launched. A message is on
        the wire on no rank before each rank has started it and has a free thread for it.
        """
        offset, found = self.offsets[rank], []
        for message, here in _taken(engine, offset):
            if message.scope == "all":
                shared = self._known[engine.key(message)]
            else:
                shared = _Shared(message, {rank: here})
                shared.compare()
            known, last = shared.ranks, shared.last
            shift = message.started - here.started
            times, done = [message.started], here.done + shift
            for moment in (known[last].started, shared.carried, known[rank].arriving):
                times.append(min(max(moment + shift, times[-1]), done))
            begun, met, carried, arriving = times
            found.append((message, Moments(begun, met, carried, arriving, done, last if len(known) > 1 else None)))
        return found


def _taken(engine: EnginePart, offset: Offset) -> list[tuple[Message, _Here]]:
    """Return the messages of an engine in the order of their starts, with the time when a thread of their group was free."""
    free: dict[str, list[float]] = {}
    found = []
    for message in sorted(engine.messages, key=lambda one: one.started):
        threads = free.setdefault(message.scope, [float("-inf")] * _CARRIERS)
        done = offset(message.done or message.waited or message.launched)
        started = offset(message.started)
        taken = max(started, heapq.heappop(threads))
        heapq.heappush(threads, done)
        found.append((message, _Here(started, taken, done, taken)))
    return found


def _let_arrive(messages: list[_Shared], world_size: int) -> None:
    """Set when the bytes of each message could leave the peers.

    Gloo tells a peer that this rank can receive behind all bytes that it has begun to send to this peer. These are bytes of
    earlier messages, and of this one if the peer took it before.
    """
    moving: list[tuple[float, _Shared]] = []  # earlier messages, with the share that a rank sends at once
    for shared in sorted(messages, key=lambda one: one.carried):
        message, carried = shared.message, shared.carried
        moving = [one for one in moving if one[1].done > shared.taken]
        share = _SENT_FIRST.get(message.kind, 0.0) / max(world_size - 1, 1)
        if message.kind == "all_gather":
            share /= gather_pieces(message.nbytes, world_size)
        order = sorted(shared.ranks, key=lambda rank: shared.ranks[rank].taken)
        for rank in order:
            told = []  # when each peer knew that this rank can receive
            for peer in reversed(order):  # peers that took it later seldom wait
                if peer != rank:
                    told.append(_told(shared.ranks[rank], shared, peer, moving, share))
                    if told[-1] <= carried:  # no peer knew sooner. Without this line the cost is quadratic in the ranks
                        break
            shared.ranks[rank].arriving = min(told, default=carried)
        if share:
            moving.append((share, shared))


def _told(here: _Here, shared: _Shared, peer: int, moving: list[tuple[float, _Shared]], share: float) -> float:
    """Return when a peer knew that this rank can receive a message. Before all ranks have taken it, that does not matter."""
    there = [(sent, one.ranks[peer]) for sent, one in moving if peer in one.ranks]
    ends = [_sent(here.taken, sent, one) for sent, one in there if one.arriving <= here.taken < one.done]
    if shared.ranks[peer].taken < here.taken:
        ends.append(_own_block(here, shared.ranks[peer], [one.done for _, one in there], shared.carried, share))
    return max([shared.carried, *ends])


def _sent(now: float, share: float, there: _Here) -> float:
    """Return when the bytes of a message that a rank has begun to send have left."""
    return min(now + share * (there.done - there.arriving), there.done)


def _own_block(here: _Here, there: _Here, ends: list[float], carried: float, share: float) -> float:
    """Return when a rank had sent its first block to a peer, unless it has the peer's bytes sooner than that allows."""
    alone = there.done - max([there.arriving, *(end for end in ends if end < there.done)])  # for the bytes of this rank
    return min(carried + share * (there.done - carried), here.done - alone)


def _engine(data: dict[str, Any]) -> EnginePart:
    data["members"] = tuple(data["members"])
    data["buckets"] = {
        label: BucketFacts(tuple(b["parameters"]), b["gradient_bytes"]) for label, b in data["buckets"].items()
    }
    data["spans"] = [Span(**one) for one in data["spans"]]
    data["messages"] = [Message(**{**one, "buckets": tuple(one["buckets"])}) for one in data["messages"]]
    return EnginePart(**data)
