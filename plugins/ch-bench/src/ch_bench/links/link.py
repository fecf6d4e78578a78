"""The description of a link: its rate, round trip, jitter and loss, in the words of ``--link``."""

import re
from typing import NamedTuple

import ch_core

UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "us": 1e-6, "ms": 1e-3, "s": 1.0}
LEGAL = (
    "legal is a number and kbit, mbit or gbit, and then a round trip, jitter and loss if the link has them, "
    "as in 200mbit,80ms,20ms jitter,1% loss"
)
NUMBER = r"(\d+(?:\.\d+)?)"
FAR_APART = 0.005  # seconds of a round trip from which on attach(link=) helps


class Link(NamedTuple):
    """A link between every two nodes.

    Attributes:
        text: the words of the link.
        rate: bits per second that a node sends, and that it receives; ``None`` for no limit.
        round_trip: seconds; ``None`` for a link in the kernel, which adds nothing.
        jitter: seconds that a packet can take longer, in each direction. The delay drifts and keeps the order of packets.
        loss: share of packets that vanish, in each direction.

    Example:
        >>> Link.parse("200mbit, 80ms, 1% loss")
        Link(text='200mbit,80ms,1% loss', rate=200000000.0, round_trip=0.08, jitter=0.0, loss=0.01)
    """

    text: str
    rate: float | None = None
    round_trip: float | None = None
    jitter: float = 0.0
    loss: float = 0.0

    @property
    def filename(self) -> str:
        """Words of the link as a part of a file's name."""
        return re.sub(r"[,% ]+", "-", self.text)

    @property
    def delayed(self) -> bool:
        """True if a process delays packets."""
        return self.round_trip is not None

    @property
    def told(self) -> str | None:
        """Words for ``attach(link=)`` if the link makes its ranks far apart.

        >>> Link.parse("200mbit,80ms,1% loss").told, Link.parse("1gbit,0.4ms").told
        ('200mbit,80ms', None)
        """
        if self.rate is None or self.round_trip is None or self.round_trip < FAR_APART:
            return None
        return str(ch_core.Link(self.rate, self.round_trip))

    @classmethod
    def parse(cls, text: str) -> "Link":
        """Return the link that a text describes.

        Raises:
            ValueError: not the words of one link.
        """
        found = cls.parse_all(text)
        if len(found) != 1:
            raise ValueError(f"{text!r} describes {len(found)} links instead of one; {LEGAL}")
        return found[0]

    @classmethod
    def parse_all(cls, text: str) -> list["Link"]:
        """Return the links of a list in which each rate begins another link.

        Raises:
            ValueError: an unknown word, or a word twice.

        Example:
            >>> [link.text for link in Link.parse_all("1gbit,200mbit,80ms,50mbit,80ms,1% loss")]
            ['1gbit', '200mbit,80ms', '50mbit,80ms,1% loss']
        """
        links: list[dict[str, float]] = []
        words: list[list[str]] = []
        for word in text.lower().split(","):
            field, value = _field(word.strip())
            if field == "rate" or not links:
                links.append({})
                words.append([])
            if field in links[-1]:
                raise ValueError(f"{text!r} gives {word.strip()!r} after another {field}; {LEGAL}")
            links[-1][field] = value
            words[-1].append(word.strip())
        for each in links:
            if each.get("jitter") or each.get("loss"):
                each.setdefault("round_trip", 0.0)
        return [cls(",".join(names), **each) for names, each in zip(words, links, strict=True)]


def _field(word: str) -> tuple[str, float]:
    """Return the field of :class:`Link` that a word sets, and its value."""
    if match := re.fullmatch(NUMBER + r"(kbit|mbit|gbit)", word):
        return "rate", float(match[1]) * UNITS[match[2]]
    if match := re.fullmatch(NUMBER + r"(us|ms|s)( jitter)?", word):
        return "jitter" if match[3] else "round_trip", float(match[1]) * UNITS[match[2]]
    if match := re.fullmatch(NUMBER + r"% loss", word):
        return "loss", float(match[1]) / 100
    raise ValueError(f"{word!r} is not a part of a link; {LEGAL}")
