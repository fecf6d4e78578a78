"""How wide the terminal is, and lines that fit into it."""

import os
import re
import shutil
import sys
import textwrap

PIPE = 160  # columns of a file or a pipe, where nobody says another


def width() -> int:
    """Columns of the terminal; in a file or a pipe what COLUMNS says, or wide enough."""
    told = os.environ.get("COLUMNS", "")
    if told.isdigit() and int(told) > 0:
        return int(told)
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else PIPE


def hanging(line: str, indent: int) -> str:
    """A line, broken between words where it is too long; what follows is indented.

    >>> import os
    >>> os.environ["COLUMNS"] = "16"
    >>> print(hanging("rank=4  of P and of Q", 8))
    rank=4  of P and
            of Q
    >>> del os.environ["COLUMNS"]
    """
    broken = textwrap.wrap(
        line, width(), subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False
    )
    return "\n".join(broken) or line


def block(text: str) -> str:
    """A text of labels and what they mean, each line of it hanging under where its meaning begins."""
    return "\n".join(hanging(line, _meaning(line)) for line in text.splitlines())


def _meaning(line: str) -> int:
    """Where the last of a line's columns begins; four more than the line's own indent if it has but one."""
    found = re.match(r"\s*\S.*?\s{2,}(?=\S)", line)
    return found.end() if found else len(line) - len(line.lstrip()) + 4
