"""A network as a few measured numbers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
        start: seconds in which a rank starts a message, before it can go on computing.
    """

    sizes: tuple[float, ...]
    seconds: tuple[float, ...]
    cpu: tuple[float, ...]
    start: float = 0.0

    @property
    def latency(self) -> float:
        """Seconds of the smallest message."""
        return self.seconds[0]

    def work(self, size: float) -> float:
        """Seconds for which a message keeps the network busy: what it takes beyond the smallest.

        A short one may have been let through by a token bucket that a longer one empties: per byte it costs no less.

        >>> Curve((100.0, 1000.0, 2000.0), (1.0, 2.0, 4.0), (0.0, 0.0, 0.0)).work(3000.0)
        5.8
        """
        by_the_byte = _slope(self.sizes, self.seconds) * (size - self.sizes[0])
        return max(_at(self.sizes, self.seconds, size) - self.latency, by_the_byte, 0.0)

    def load(self, size: float) -> float:
        """Cores that the message keeps busy while it is under way."""
        seconds = _at(self.sizes, self.seconds, size)
        return min(2.0, _at(self.sizes, self.cpu, size) / seconds) if seconds > 0 else 0.0


def _slope(sizes: Sequence[float], values: Sequence[float]) -> float:
    """A byte's part of what large messages take, between sizes so far apart that a disturbance of one is little of it."""
    far = max((place for place, size in enumerate(sizes) if 2 * size <= sizes[-1]), default=None)
    return 0.0 if far is None else max(0.0, (values[-1] - values[far]) / (sizes[-1] - sizes[far]))


def _at(sizes: Sequence[float], values: Sequence[float], size: float) -> float:
    """Linear between the measured sizes, and beyond the largest with the slope of large ones."""
    if size <= sizes[0] or len(sizes) < 2:
        return values[0]
    if size > sizes[-1]:
        return values[-1] + _slope(sizes, values) * (size - sizes[-1])
    for (a, left), (b, right) in pairwise(zip(sizes, values, strict=True)):
        if size <= b:
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
