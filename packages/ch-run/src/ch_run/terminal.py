"""The console and tables of `doctor`, by rich."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from commhooks import width


def console() -> Console:
    """Return a console as wide as the terminal."""
    return Console(width=width(), highlight=False)


def table(*columns: str, rows: Sequence[Sequence[str]], whole: Sequence[str] = ()) -> Table:
    """Return a plain table.

    Args:
        columns: headings.
        rows: cells, with markup.
        whole: headings of columns that are never broken, e.g. names that users copy. The others share the rest.
    """
    made = Table(box=None, header_style="bold", pad_edge=False)
    for place, column in enumerate(columns):
        cells = [len(Text.from_markup(row[place])) for row in rows]
        longest = max([len(column), *cells])
        keep = column in whole
        made.add_column(column, no_wrap=keep, min_width=longest if keep else None, overflow="fold")
    for row in rows:
        made.add_row(*row)
    return made
