"""Estimates the offsets between the clocks of ranks from messages that all of them exchanged.

A collective cannot end on one rank before it has begun on every rank. With the offset ``o`` of a rank (seconds to add to
its clock for the clock of the reference rank), every common message gives an interval::

    begun_reference - ended_rank  <=  o  <=  ended_reference - begun_rank

The intersection of the intervals of many messages is narrow, because sometimes this rank is last and sometimes the
other. The clocks run at slightly different speeds. So an interval from a message ``t`` seconds away is widened by
:data:`DRIFT` times ``t``. The bound of the error follows from the widened intervals alone, and assumes nothing on the
delays of messages.
"""

from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

DRIFT = 1e-4
"""Largest difference of the speeds of two clocks: 100 seconds per million. Quartz oscillators stay below 50 each."""

Times = Mapping[Hashable, tuple[float, float]]
"""Begin and end on one rank's clock of each message, by a key that is equal on all ranks of the message."""


@dataclass(frozen=True, slots=True)
class Offset:
    """Maps the clock of a rank to the clock of the reference rank.

    Attributes:
        seconds: offset at ``at``.
        speed: change of the offset for each second of the rank's clock.
        at: seconds on the rank's clock.
        bound: largest error in seconds at any common message; ``None`` if the ranks have no common message.
    """

    seconds: float = 0.0
    speed: float = 0.0
    at: float = 0.0
    bound: float | None = 0.0

    def __call__(self, time: float) -> float:
        """Return a time of the rank as a time of the reference rank."""
        return time + self.seconds + self.speed * (time - self.at)


def align(ranks: Mapping[int, Times]) -> dict[int, Offset]:
    """Return the offset of each rank to the lowest rank.

    Ranks without a common message with the lowest rank, as in a mesh, are aligned through others. Their bounds add up.

    Args:
        ranks: rank -> its messages.

    Example:
        >>> slow = {"a": (10.0, 11.0), "b": (12.5, 12.9)}  # its clock is 10 s ahead
        >>> found = align({0: {"a": (0.1, 0.9), "b": (2.0, 3.1)}, 1: slow})
        >>> round(found[1].seconds, 2), round(found[1].bound, 2)
        (-10.15, 0.75)
    """
    if not ranks:
        return {}
    first = min(ranks)
    found = {first: Offset()}
    queue = deque([first])
    while queue:
        near = queue.popleft()
        for rank in sorted(ranks):
            if rank in found:
                continue
            offset = between(ranks[near], ranks[rank])
            if offset is not None:
                found[rank] = _chained(offset, found[near])
                queue.append(rank)
    return {rank: found.get(rank, Offset(bound=None)) for rank in sorted(ranks)}


def between(reference: Times, other: Times) -> Offset | None:
    """Return the offset of ``other``'s clock to the reference; ``None`` if they have no common message."""
    common = [key for key in other if key in reference]
    if not common:
        return None
    # time on the other clock, lowest and highest offset
    rows = sorted((sum(other[k]) / 2, reference[k][0] - other[k][1], reference[k][1] - other[k][0]) for k in common)
    at = rows[0][0]
    times = [time - at for time, _, _ in rows]
    lows, highs = [low for _, low, _ in rows], [high for _, _, high in rows]
    speed = _speed(times, lows, highs)
    low, high = _range(times, lows, highs, speed)
    line = (low + high) / 2
    lowest, highest = _highest_low(times, lows), [-value for value in _highest_low(times, [-h for h in highs])]
    errors = [
        max(upper - line - speed * t, line + speed * t - lower)
        for t, lower, upper in zip(times, lowest, highest, strict=True)
    ]
    return Offset(line, speed, at, max(errors))


def _range(times: Sequence[float], lows: Sequence[float], highs: Sequence[float], speed: float) -> tuple[float, float]:
    """Return the lowest and highest offset at time 0 that all intervals allow for this speed."""
    low = max(value - speed * t for t, value in zip(times, lows, strict=True))
    return low, min(value - speed * t for t, value in zip(times, highs, strict=True))


def _speed(times: Sequence[float], lows: Sequence[float], highs: Sequence[float]) -> float:
    """Return 0 if one offset fits all intervals, otherwise the speed that fits them best."""
    low, high = _range(times, lows, highs, 0.0)
    if low <= high:
        return 0.0
    left, right = -DRIFT, DRIFT
    for _ in range(60):  # the width of the range is concave in the speed
        a, b = left + (right - left) / 3, right - (right - left) / 3
        if _width(times, lows, highs, a) < _width(times, lows, highs, b):
            left = a
        else:
            right = b
    return (left + right) / 2


def _width(times: Sequence[float], lows: Sequence[float], highs: Sequence[float], speed: float) -> float:
    low, high = _range(times, lows, highs, speed)
    return high - low


def _highest_low(times: Sequence[float], lows: Sequence[float]) -> list[float]:
    """Return at each time the highest lower end of all intervals, each lowered by :data:`DRIFT` times its distance."""
    found = list(lows)
    for i in range(1, len(found)):
        found[i] = max(found[i], found[i - 1] - DRIFT * (times[i] - times[i - 1]))
    for i in range(len(found) - 2, -1, -1):
        found[i] = max(found[i], found[i + 1] - DRIFT * (times[i + 1] - times[i]))
    return found


def _chained(offset: Offset, onward: Offset) -> Offset:
    bound = None if offset.bound is None or onward.bound is None else offset.bound + onward.bound
    there = offset.at + offset.seconds  # the same moment on the near rank's clock
    seconds = offset.seconds + onward.seconds + onward.speed * (there - onward.at)
    return Offset(seconds, offset.speed + onward.speed, offset.at, bound)
