"""Width of the terminal, text that fits into it, and tables."""

import argparse
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

PIPE = 160  # columns of a file or a pipe


def width() -> int:
    """Return the columns of the terminal. In a file or a pipe COLUMNS decides, and PIPE without it."""
    columns = os.environ.get("COLUMNS", "")
    if columns.isdigit() and int(columns) > 0:
        return int(columns)
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else PIPE


def hanging(line: str, indent: int, most: int | None = None) -> str:
    """Break a long line between words and indent its continuation.

    Args:
        line: text.
        indent: columns before the continuation.
        most: columns at most; by default the terminal's.

    >>> print(hanging("rank=4  of P and of Q", 8, 16))
    rank=4  of P and
            of Q
    """
    columns = min(width(), most or width())
    broken = textwrap.wrap(
        line, columns, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False
    )
    return "\n".join(broken) or line


def block(text: str) -> str:
    """Break the long lines of a text of labels and values. Continuations hang under the values."""
    return "\n".join(hanging(line, _value_column(line)) for line in text.splitlines())


def _value_column(line: str) -> int:
    """Return the column of a line's value, or its own indent and four if it has no label."""
    found = re.match(r"\s*\S.*?\s{2,}(?=\S)", line)
    return found.end() if found else len(line) - len(line.lstrip()) + 4


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Help text of at most 80 columns. Description and epilog keep their line breaks."""

    def __init__(self, prog: str) -> None:
        columns = shutil.get_terminal_size().columns
        super().__init__(prog, max_help_position=22, width=min(80, columns))


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
