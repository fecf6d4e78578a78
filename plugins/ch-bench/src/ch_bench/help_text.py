"""Help texts of `commhooks advise` and `commhooks bench`, which fit 80 columns."""

import argparse
import shutil
import textwrap


class HelpFormatter(argparse.HelpFormatter):
    """Help of at most 80 columns. Paragraphs are filled, and indented blocks keep their lines."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=22, width=min(80, shutil.get_terminal_size().columns))

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        filled = [
            part if part.startswith(" ") else textwrap.fill(part, width, break_on_hyphens=False)
            for part in text.strip().split("\n\n")
        ]
        return "\n\n".join(filled)
