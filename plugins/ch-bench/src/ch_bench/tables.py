"""Tables and text of `commhooks advise` that fit the terminal."""

import re
from collections.abc import Iterable, Iterator

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text


def shown(*parts: RenderableType, width: int | None = None) -> str:
    """Return parts as a console of this width shows them; the terminal's width by default. Square brackets have no meaning."""
    console = Console(width=width, highlight=False, markup=False)
    with console.capture() as found:
        for part in parts:
            console.print(part)
    return without_trailing_spaces(found.get())


def without_trailing_spaces(text: str) -> str:
    """Return text without spaces at the ends of its lines, which tables have. Colours stay.

    >>> without_trailing_spaces("wide column  ")
    'wide column'
    """
    return re.sub(r" +((?:\x1b\[[\d;]*m)*)$", r"\1", text, flags=re.MULTILINE)


def columns(first: str, *others: str) -> Table:
    """Return an empty table whose first column alone is broken into lines."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column(first, overflow="fold")
    for name in others:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def indented(sentences: Iterable[str]) -> Iterator[Padding]:
    """Yield sentences as paragraphs whose lines are all indented, each with its full stop."""
    for sentence in sentences:
        yield Padding(Text(f"{sentence}."), (0, 0, 0, 2), expand=False)


def milli(seconds: float) -> str:
    """Return milliseconds with as many digits as matter.

    >>> milli(0.01234), milli(0.1234)
    ('12.3', '123')
    """
    return f"{seconds * 1e3:.{0 if seconds >= 0.1 else 1}f}"


def bandwidth(bits: float | None) -> str:
    """Return bits per second as text.

    >>> bandwidth(2.5e9), bandwidth(2e8), bandwidth(None)
    ('2.5 Gbit/s', '200 Mbit/s', 'never')
    """
    if bits is None:
        return "never"
    if bits == float("inf"):
        return "any"
    unit, size = ("Gbit/s", 1e9) if bits >= 1e9 else ("Mbit/s", 1e6)
    return f"{bits / size:{'.0f' if bits >= 100 * size else '.3g'}} {unit}"
