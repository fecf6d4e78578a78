"""Width of the terminal, and text that fits into it."""

import argparse
import re
import shutil
import textwrap

from ch_core import plain

PIPE = 80  # columns of a file or a pipe, because users read both in a terminal
MOST_LINES = 12  # of an error


def shortened(text: str, most: int = MOST_LINES) -> str:
    r"""Return the begin of an error of more than some lines of 80 columns. A plugin's exception may have hundreds.

    >>> print(shortened("a\nb\nc\nd", 3))
    a
    b
    ... (2 more lines; --json shows all)
    """
    lines, room = text.splitlines(), 80 * most
    if len(lines) > most:
        lines = [*lines[: most - 1], f"... ({len(lines) - most + 1} more lines; --json shows all)"]
    text = "\n".join(lines)
    return text if len(text) <= room else f"{text[:room]} ... ({len(text) - room} more characters; --json shows all)"


def width() -> int:
    """Return COLUMNS, or else the columns of the terminal, or PIPE if the output is a file or a pipe."""
    return shutil.get_terminal_size((PIPE, 24)).columns


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
    line = plain(line)
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
