"""`list` and `describe`. Nothing here imports a hook."""

import argparse
import json
import sys
from dataclasses import asdict

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from commhooks.api import lookup
from commhooks.registry.description import record, text
from commhooks.registry.registry import REGISTRY


def console_of() -> Console:
    """A console as wide as the terminal, or wide enough for a file or a pipe."""
    return Console() if sys.stdout.isatty() else Console(width=160)


def table_of(*columns: str) -> Table:
    """A plain table whose first three columns are never broken: they are what one copies."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for place, column in enumerate(columns):
        table.add_column(column, no_wrap=place < 3)
    return table


def run_list(arguments: argparse.Namespace) -> int:
    """Print the hooks; the failures too, since a missing hook may be one of them."""
    specs = lookup.list_hooks(arguments.pattern, kind=arguments.kind)
    failures = lookup.failures()
    if arguments.json:
        found = {
            "hooks": [record(spec) for spec in specs],
            "failures": [asdict(failure) for failure in failures],
            "skipped": REGISTRY.snapshot().skipped,
        }
        print(json.dumps(found, indent=2))
        return 1 if failures else 0
    console = console_of()
    wide = console.width >= 120
    table = table_of("name", "kind", "from", "what it does", *(["properties"] if wide else []))
    for spec in specs:
        also = f" [dim](also {', '.join(spec.aliases)})[/]" if spec.aliases else ""
        marks = sorted(spec.capabilities) + ([spec.stability] if spec.stability != "stable" else [])
        row = (spec.name, spec.kind, f"{spec.provider} {spec.version}", escape(spec.summary) + also)
        table.add_row(*row, *([", ".join(marks)] if wide else []))
    console.print(table if specs else f"no hook matches {arguments.pattern!r}")
    for failure in failures:
        console.print(f"[red]failed[/] {escape(str(failure))}", soft_wrap=True)
    for dist in REGISTRY.snapshot().skipped:
        console.print(f"[dim]left out by the environment: {escape(dist)}[/]")
    return 1 if failures else 0


def run_describe(arguments: argparse.Namespace) -> int:
    """Print one hook."""
    spec = lookup.spec(arguments.name, arguments.kind)
    print(json.dumps(record(spec), indent=2) if arguments.json else text(spec))
    return 0
