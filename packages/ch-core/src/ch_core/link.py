"""The link between ranks that are far apart, as the user describes it."""

import re
from dataclasses import dataclass

from ch_core.errors import HookConfigError

_RATES = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_TIMES = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_TEXT = re.compile(r"(\d+(?:\.\d+)?)\s*(kbit|mbit|gbit)\s*,\s*(\d+(?:\.\d+)?)\s*(us|ms|s)")


@dataclass(frozen=True, slots=True)
class Link:
    """Rate and round trip of the slowest link between two ranks.

    It decides how messages are sent, and so the order in which numbers are added and how often they are rounded. All ranks
    need the same link, and a resumed run the one of the run before.

    Args:
        rate: bits per second in one direction.
        round_trip: seconds until the answer to a short message arrives.
    """

    rate: float
    round_trip: float

    @classmethod
    def parse(cls, text: str) -> "Link":
        """Return the link of a text: a rate in kbit, mbit or gbit and a round trip in us, ms or s, or ``"far"``.

        ``"far"`` is 200 Mbit/s and 80 ms, as between two continents.

        Raises:
            HookConfigError: the text is neither.

        >>> Link.parse("200mbit,80ms") == Link.parse("far") == Link(200e6, 0.08)
        True
        >>> str(Link.parse("1 gbit, 0.5 ms"))
        '1gbit,500us'
        """
        if text.strip().lower() == "far":
            return cls(200e6, 0.080)
        found = _TEXT.fullmatch(text.strip().lower())
        if found is None or not (float(found[1]) and float(found[3])):
            raise HookConfigError(
                f"link={text!r}: expected a rate and a round trip, for example '200mbit,80ms', or 'far', which means just that"
            )
        return cls(float(found[1]) * _RATES[found[2]], float(found[3]) * _TIMES[found[4]])

    @property
    def bytes_on_the_way(self) -> float:
        """Bytes that the link carries in half a round trip: what a message costs beside its own bytes."""
        return self.rate / 8 * self.round_trip / 2

    def __str__(self) -> str:
        return f"{_written(self.rate, _RATES)},{_written(self.round_trip, _TIMES)}"


def _written(value: float, units: dict[str, float]) -> str:
    """Return a value in the largest unit in which it is at least one."""
    unit = max(
        (name for name in units if value >= units[name]),
        key=units.__getitem__,
        default=min(units, key=units.__getitem__),
    )
    return f"{value / units[unit]:.12g}{unit}"  # ranks compare these words
