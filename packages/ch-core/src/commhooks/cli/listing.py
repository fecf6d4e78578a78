"""`list` and `describe`. Nothing here imports a hook."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from commhooks.api import lookup
from commhooks.cli.terminal import block, width
from commhooks.registry.description import described, record
from commhooks.registry.registry import REGISTRY
from commhooks.registry.specs import HookSpec


def console_of() -> Console:
    """A console as wide as the terminal."""
    return Console(width=width())


def table_of(*columns: str, rows: Sequence[Sequence[str]], whole: Sequence[str] = ()) -> Table:
    """A plain table. A column of ``whole`` is as wide as its longest cell, and never cut or broken: it holds what one
    copies, or came for. The others share what is left, and are broken into lines.

    Args:
        columns: heads.
        rows: cells, with markup.
        whole: some of the heads.
    """
    table = Table(box=None, header_style="bold", pad_edge=False)
    for place, column in enumerate(columns):
        longest = max([len(column), *(len(Text.from_markup(row[place])) for row in rows)])
        kept = column in whole
        table.add_column(column, no_wrap=kept, min_width=longest if kept else None, overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def found_by(word: str, kind: str | None) -> list[HookSpec]:
    """The hooks that a word stands for: a shell pattern of names, or a part of what `list` says of them."""
    if any(sign in word for sign in "*?["):
        return lookup.list_hooks(word, kind=kind)
    word = word.lower()
    return [
        spec
        for spec in lookup.list_hooks(kind=kind)
        if any(word in text.lower() for text in (*spec.names, spec.summary, spec.provider, *spec.capabilities))
    ]


def run_list(arguments: argparse.Namespace) -> int:
    """Print the hooks; the failures too, since a missing hook may be one of them."""
    specs = found_by(arguments.word, arguments.kind)
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
    heads = ("name", "kind", "from", "what it does", *(["properties"] if wide else []))
    rows = []
    for spec in specs:
        also = f" [dim](also {', '.join(spec.aliases)})[/]" if spec.aliases else ""
        marks = sorted(spec.capabilities) + ([spec.stability] if spec.stability != "stable" else [])
        origin = f"{spec.provider} {spec.version}" if wide else spec.provider
        row = (spec.name, spec.kind, origin, escape(spec.summary) + also)
        rows.append([*row, *([", ".join(marks)] if wide else [])])
    table = table_of(*heads, rows=rows, whole=heads[:3])
    console.print(table if specs else f"no hook matches {arguments.word!r}")
    for failure in failures:
        console.print(f"[red]failed[/] {escape(str(failure))}", soft_wrap=True)
    for dist in REGISTRY.snapshot().skipped:
        console.print(f"[dim]left out by the environment: {escape(dist)}[/]")
    return 1 if failures else 0


def run_describe(arguments: argparse.Namespace) -> int:
    """Print one hook, or every level of an expression."""
    if arguments.json:
        found = described(arguments.name, arguments.kind)
        levels = [{**record(spec), "given": config} for spec, config in found]
        print(json.dumps(levels[0] if len(levels) == 1 else {"expression": arguments.name, "levels": levels}, indent=2))
    else:
        print(block(lookup.describe(arguments.name, arguments.kind)))
    return 0
