"""What a step would have taken, from what every rank did in it and what was measured of the network.

What is predicted is run: the model, the hook and the engine are the real ones, and only the messages are not sent. Each rank
notes for how long it computed between posting its messages and waiting for them. The notes of all ranks are then put together in
virtual time: a message begins when the last rank has posted it, and takes what the probe has measured; a rank that waits goes
on when it has come. So what overlaps with what is decided by the program itself, and a rank that is late holds up the others.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from ch_bench.advise.link import Network

_EPS = 1e-12


class Sent(NamedTuple):
    """One message that a hook has sent: what is probed is what hooks send.

    Attributes:
        kind, dtype: as in :data:`~ch_bench.advise.link.Key`.
        size: bytes of the full-size tensor.
    """

    kind: str
    dtype: str
    size: int


class Note(NamedTuple):
    """What a rank did: it computed, and then sent a message or waited for one.

    Attributes:
        seconds: that it computed before.
        message: its number, in the order in which messages were posted; -1 at the end of the step.
        sent: what was posted; ``None`` if it was waited for.
    """

    seconds: float
    message: int
    sent: Sent | None


class Recorder:
    """Notes what this rank does in a step."""

    def __init__(self) -> None:
        self.notes: list[Note] = []
        self._posted, self._since = 0, 0.0

    def begin(self) -> None:
        """A step begins."""
        self.notes, self._posted = [], 0
        self._since = time.perf_counter()

    def post(self, sent: Sent) -> int:
        """A message is sent; its number."""
        number = self._posted
        self._posted += 1
        self._note(number, sent)
        return number

    def wait(self, number: int) -> None:
        """A message is waited for."""
        self._note(number, None)

    def end(self) -> list[Note]:
        """The step is done; what it was made of."""
        self._note(-1, None)
        return self.notes

    def _note(self, number: int, sent: Sent | None) -> None:
        now = time.perf_counter()
        self.notes.append(Note(now - self._since, number, sent))
        self._since = time.perf_counter()

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """What is done inside belongs to no rank: it stands for what others would do."""
        stopped = time.perf_counter()
        yield
        self._since += time.perf_counter() - stopped


@dataclass(slots=True, eq=False)
class _Message:
    left: float  # seconds of transfer, alone
    latency: float
    load: float
    posted: int = 0  # ranks that have
    there: float | None = None  # when it has come, once the last byte is through


@dataclass(slots=True, eq=False)
class _Rank:
    notes: Sequence[Note]
    left: float = 0.0  # seconds to compute until the next note
    place: int = 0
    awaits: _Message | None = None
    waited: float = 0.0
    ended: float | None = None


@dataclass(slots=True)
class Replay:
    """All ranks' notes of one step, in virtual time.

    Two messages go at a time, as gloo has two threads a group; the others follow in the order in which they came.
    """

    network: Network
    ranks: list[_Rank]
    now: float = 0.0
    _queue: list[_Message] = field(default_factory=list)
    _messages: list[_Message] = field(default_factory=list)
    _credit: float = 0.0

    @classmethod
    def of(cls, network: Network, notes: Sequence[Sequence[Note]]) -> list[tuple[float, float]]:
        """Of each rank, the seconds of the step and those of them in which it waited.

        Args:
            network: what the probe has found.
            notes: of each rank; all post the same messages in the same order.

        Example:
            >>> from ch_bench.advise.link import Curve, Network
            >>> network = Network({("all_reduce", "float32"): Curve((0.0, 1.0), (0.5, 1.5), (0.0, 0.0))}, spare=1.0)
            >>> big = Sent("all_reduce", "float32", 1)
            >>> early = [Note(1.0, 0, big), Note(0.0, 0, None), Note(1.0, -1, None)]
            >>> late = [Note(2.0, 0, big), Note(0.0, 0, None), Note(1.0, -1, None)]
            >>> Replay.of(network, [early, late])  # the message takes 1.5 s from when both have posted it
            [(4.5, 2.5), (4.5, 1.5)]
        """
        ranks = [_Rank(each) for each in notes]
        replay = cls(network, ranks, _credit=network.burst)
        for rank in ranks:
            replay._compute_on(rank)
        replay._run()
        return [(rank.ended or 0.0, rank.waited) for rank in ranks]

    def _run(self) -> None:
        while any(rank.ended is None for rank in self.ranks):
            for rank in self.ranks:
                while rank.ended is None and rank.awaits is None and rank.left <= _EPS:
                    self._next(rank)
            computing = [rank for rank in self.ranks if rank.ended is None and rank.awaits is None]
            speed, share = self._speeds(bool(computing))
            spans = [rank.left / share for rank in computing]
            spans += [message.left / speed for message in self._queue[:2]]
            awaited = (rank.awaits for rank in self.ranks if rank.awaits is not None)
            spans += [message.there - self.now for message in awaited if message.there is not None]
            if spans:
                self._go_on(max(0.0, min(spans)), speed, share)

    def _next(self, rank: _Rank) -> None:
        """A rank has come to what it noted next."""
        note = rank.notes[rank.place]
        rank.place += 1
        if note.message < 0:
            rank.ended = self.now
            return
        if note.sent is None:
            message = self._messages[note.message]
            if message.there is None or message.there > self.now + _EPS:
                rank.awaits = message
        else:
            self._post(note.message, note.sent)
        if rank.awaits is None:
            self._compute_on(rank)

    def _compute_on(self, rank: _Rank) -> None:
        note = rank.notes[rank.place]
        rank.left = note.seconds
        if note.sent is not None:
            rank.left += self.network.curve(note.sent.kind, note.sent.dtype).start

    def _post(self, number: int, sent: Sent) -> None:
        """A rank has posted a message: it begins when all have."""
        curve = self.network.curve(sent.kind, sent.dtype)
        if number == len(self._messages):
            self._messages.append(_Message(curve.work(sent.size), curve.latency, curve.load(sent.size)))
        message = self._messages[number]
        message.posted += 1
        if message.posted == len(self.ranks):
            given = min(self._credit, message.left)
            self._credit -= given
            message.left -= given
            self._queue.append(message)

    def _speeds(self, computing: bool) -> tuple[float, float]:
        """How fast each message under way goes, against alone; and how fast ranks compute, against undisturbed."""
        active = self._queue[:2]
        speed = 1.0 if len(active) < 2 else 1.0 / self.network.together
        wanted = speed * sum(message.load for message in active)
        spare = self.network.spare
        if not computing or wanted <= spare:
            return speed, 1.0
        given = min(wanted, max(spare, (spare + 1.0) / 2))
        return speed * given / wanted, min(1.0, spare + 1.0 - given)

    def _go_on(self, span: float, speed: float, share: float) -> None:
        self.now += span
        if not self._queue:
            self._credit = min(self.network.burst, self._credit + span)
        for message in self._queue[:2]:
            message.left -= span * speed
            if message.left <= _EPS:
                message.there = self.now + message.latency
        self._queue = [message for message in self._queue if message.there is None]
        for rank in self.ranks:
            if rank.ended is not None:
                continue
            if rank.awaits is None:
                rank.left -= span * share
                continue
            rank.waited += span
            if rank.awaits.there is not None and rank.awaits.there <= self.now + _EPS:
                rank.awaits = None
                self._compute_on(rank)
