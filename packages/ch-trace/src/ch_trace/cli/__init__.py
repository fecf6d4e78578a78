"""The command `trace` of `python -m commhooks`. `--help` imports this module, so it imports no torch."""

import argparse
from collections.abc import Callable
from pathlib import Path


def trace(parser: argparse.ArgumentParser) -> Callable[[argparse.Namespace], int]:
    """Print the figures of traces, or draw them as one page for a browser."""
    parser.add_argument("path", help="file that Trace wrote, or folder of commhooks run --trace")
    parser.add_argument("--html", metavar="FILE", help="write one page with the time line of all ranks there")
    return run


def run(arguments: argparse.Namespace) -> int:
    """Print the summary of each trace, and write the page."""
    from ch_core import plain
    from ch_trace.page import TraceFile, html_page
    from commhooks import HookConfigError, why_unwritable, write_whole

    if arguments.html and (problem := why_unwritable(Path(arguments.html))):
        raise HookConfigError(f"--html {arguments.html} cannot be written ({problem}): give another path")
    traces = TraceFile.read(Path(arguments.path))
    for one in traces:
        print(plain(f"{one.path}\n\n{one.summary}\n"))  # a file of others, with names of their parameters
    if arguments.html:
        write_whole(Path(arguments.html), html_page(traces))
        print(f"page written to {arguments.html}")
    return 0
