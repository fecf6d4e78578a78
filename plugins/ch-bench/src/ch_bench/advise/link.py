"""A network as a few measured numbers, and a clock that tells how long messages over it would take.

What is predicted is run: the model, the hook and the engine are the real ones, and only the messages are not sent. While
the rank computes, messages that are under way go on by the measured times; where it would wait, the virtual clock is put
forward instead. So what overlaps with what is decided by the program itself, and not by a formula for it.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise

Key = tuple[str, str]
"""A collective and the dtype that it adds up, ``("all_reduce", "float32")``; ``""`` where nothing is added up."""


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds of one message by its size, alone on the network.

    Attributes:
        sizes: bytes of the full-size tensor, rising.
        seconds: of a message of that size that follows others.
        cpu: seconds of this process's cores for it, besides the thread that waits.
    """

    sizes: tuple[float, ...]
    seconds: tuple[float, ...]
    cpu: tuple[float, ...]

    @property
    def latency(self) -> float:
        """Seconds of the smallest message."""
        return self.seconds[0]

    def work(self, size: float) -> float:
        """Seconds for which a message keeps the network busy: what it takes beyond the smallest.

        A short one may have been let through by a token bucket that a longer one empties: per byte it costs no less.

        >>> Curve((100.0, 1000.0, 2000.0), (1.0, 2.0, 4.0), (0.0, 0.0, 0.0)).work(3000.0)
        5.0
        """
        return max(_at(self.sizes, self.seconds, size) - self.latency, self._slope() * (size - self.sizes[0]), 0.0)

    def load(self, size: float) -> float:
        """Cores that the message keeps busy while it is under way."""
        seconds = _at(self.sizes, self.seconds, size)
        return min(2.0, _at(self.sizes, self.cpu, size) / seconds) if seconds > 0 else 0.0

    def _slope(self) -> float:
        if len(self.sizes) < 2:
            return 0.0
        return max(0.0, (self.seconds[-1] - self.seconds[-2]) / (self.sizes[-1] - self.sizes[-2]))


def _at(sizes: Sequence[float], values: Sequence[float], size: float) -> float:
    """Linear between the measured sizes, and beyond the largest with its slope."""
    if size <= sizes[0] or len(sizes) < 2:
        return values[0]
    for (a, left), (b, right) in pairwise(zip(sizes, values, strict=True)):
        if size <= b or b == sizes[-1]:
            return left + (right - left) * (size - a) / (b - a)
    raise AssertionError("sizes rise")


@dataclass(frozen=True, slots=True)
class Network:
    """What the probe has found.

    Attributes:
        curves: by collective and dtype.
        together: how much longer two messages take that are sent at once than one, 1 to 2.
        burst: seconds of transfer that an idle network gives for nothing (a token bucket).
        spare: cores that a rank has besides the one that it computes on.
    """

    curves: Mapping[Key, Curve]
    together: float = 2.0
    burst: float = 0.0
    spare: float = 0.0

    def curve(self, kind: str, dtype: str) -> Curve:
        """That of a collective; of a dtype that was not probed, any of the same collective."""
        found = self.curves.get((kind, dtype))
        if found is None:
            found = next((c for (k, _), c in self.curves.items() if k == kind), None)
        return found if found is not None else next(iter(self.curves.values()))


@dataclass(slots=True, eq=False)
class _Message:
    left: float  # seconds of transfer, alone
    latency: float
    load: float
    done: float | None = None  # when the last byte was through


@dataclass(slots=True)
class Wire:
    """Messages under way, in virtual time.

    Two go at a time, as gloo has two threads a group; the others follow in the order in which they came.
    """

    network: Network
    now: float = 0.0
    _queue: list[_Message] = field(default_factory=list)
    _credit: float = 0.0

    def begin(self, now: float) -> None:
        """A step begins, and nothing is under way."""
        self.now, self._credit = now, self.network.burst
        self._queue.clear()

    def post(self, size: float, kind: str, dtype: str) -> _Message:
        """Send a message now."""
        curve = self.network.curve(kind, dtype)
        work = curve.work(size)
        given = min(self._credit, work)
        self._credit -= given
        message = _Message(work - given, curve.latency, curve.load(size))
        self._queue.append(message)
        return message

    def computed(self, seconds: float) -> float:
        """The rank has computed for so long; how much longer it has taken, because messages took its core."""
        begun, left = self.now, seconds
        while left > 1e-12:
            speed, share = self._speeds(computing=True)
            span = left / share
            ends = self._next_end(speed)
            if ends is not None and ends < span:
                span = ends
            self._go_on(span, speed)
            left -= span * share
        return self.now - begun - seconds

    def finish(self, message: _Message) -> float:
        """The rank waits for a message; when it has come."""
        while message.done is None:
            speed, _ = self._speeds(computing=False)
            self._go_on(self._next_end(speed) or 0.0, speed)
        there = message.done + message.latency
        while there - self.now > 1e-12:  # others go on meanwhile
            speed, _ = self._speeds(computing=False)
            end = self._next_end(speed)
            self._go_on(there - self.now if end is None else min(there - self.now, end), speed)
        return self.now

    def _speeds(self, *, computing: bool) -> tuple[float, float]:
        """How fast each message under way goes, against alone; and how fast the rank computes, against undisturbed."""
        active = self._queue[:2]
        speed = 1.0 if len(active) < 2 else 1.0 / self.network.together
        wanted = speed * sum(message.load for message in active)
        spare = self.network.spare
        if not computing or wanted <= spare:
            return speed, 1.0
        given = min(wanted, max(spare, (spare + 1.0) / 2))
        return speed * given / wanted, min(1.0, spare + 1.0 - given)

    def _next_end(self, speed: float) -> float | None:
        return min(message.left for message in self._queue[:2]) / speed if self._queue else None

    def _go_on(self, span: float, speed: float) -> None:
        if not self._queue:
            self._idle(span)
            return
        self.now += span
        for message in self._queue[:2]:
            message.left -= span * speed
            if message.left <= 1e-12:
                message.done = self.now
        self._queue = [message for message in self._queue if message.done is None]

    def _idle(self, span: float) -> None:
        if span > 0:
            self.now += span
            if not self._queue:
                self._credit = min(self.network.burst, self._credit + span)


class Clock:
    """The rank's own time, with the waiting added that a network would have caused.

    Args:
        wire: of the network.
    """

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self.waited = 0.0  # seconds, virtual
        self._seen = 0.0

    def begin(self) -> None:
        """A step begins."""
        self._seen = time.perf_counter()
        self.wire.begin(0.0)
        self.waited = 0.0

    def tick(self) -> float:
        """Let the wire know of what was computed since the last call; the virtual time."""
        now = time.perf_counter()
        self.wire.computed(now - self._seen)
        self._seen = now
        return self.wire.now

    def wait(self, message: _Message) -> None:
        """Put the clock forward to when a message has come."""
        before = self.tick()
        self.waited += self.wire.finish(message) - before

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """What is done inside belongs to no rank: it stands for what others would do."""
        self.tick()
        yield
        self._seen = time.perf_counter()
