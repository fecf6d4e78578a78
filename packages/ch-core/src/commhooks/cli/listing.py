"""`list` and `describe`. They import no hook and no torch."""

import argparse
import json
from dataclasses import asdict
from typing import Any

from rich.markup import escape

from commhooks.api import hooks
from commhooks.cli.terminal import block, console, hanging, width
from commhooks.registry.registry import REGISTRY
from commhooks.registry.spec import GROUPS, HookSpec


def found_by(word: str, kind: str | None) -> list[HookSpec]:
    """Return the hooks that match a shell pattern of names, contain a word, or come from the package of this name.

    A word is looked for in names, aliases and summaries.
    """
    if any(sign in word for sign in "*?["):
        return hooks.list_hooks(word, kind=kind)
    word = word.lower()
    return [
        spec
        for spec in hooks.list_hooks(kind=kind)
        if word == spec.provider.lower() or any(word in text.lower() for text in (*spec.names, spec.summary))
    ]


def by_use(specs: list[HookSpec]) -> list[tuple[str, list[HookSpec]]]:
    """Return the headings of `GROUPS` that have hooks, each with its hooks, recommended ones first."""
    groups = [
        (heading, sorted((spec for spec in specs if spec.group == group), key=lambda spec: not spec.recommended))
        for group, heading in GROUPS.items()
    ]
    return [(heading, some) for heading, some in groups if some]


def run_list(arguments: argparse.Namespace) -> int:
    """Print the hooks, and the failed plugins that may have provided others.

    Returns:
        1 if no hook matches or a plugin failed, else 0.
    """
    specs, failures = found_by(arguments.word, arguments.kind), hooks.failures()
    skipped = REGISTRY.snapshot().skipped
    status = 1 if failures or not specs else 0
    if arguments.json:
        found = {
            "hooks": [as_dict(spec) for spec in specs],
            "failures": [asdict(f) for f in failures],
            "skipped": skipped,
        }
        print(json.dumps(found, indent=2))
        return status
    out = console()
    if not specs:
        kind = f" of kind {arguments.kind}" if arguments.kind else ""
        out.print(f"no hook{kind} matches {arguments.word!r}; commhooks list shows all", markup=False)
    names = max((len(spec.name) for spec in specs), default=0)
    providers = max((len(spec.provider) for spec in specs), default=0)
    indent = min(2 + names + 2 + providers + 2, width() // 2)  # one column of summaries for all groups
    for heading, some in by_use(specs):
        out.print(f"[bold]{heading}[/]")
        for spec in some:
            also = f" (also {', '.join(spec.aliases)})" if spec.aliases else ""
            star = "*" if spec.recommended else " "
            row = f"{star} {spec.name:<{names}}  {spec.provider:<{providers}}  {spec.summary}{also}"
            print(hanging(row, indent))
        print()
    if any(spec.recommended for spec in specs):
        closing = (
            "A star marks the hooks to try first in each group. commhooks describe NAME says when to use a hook, and its cost in "
            "loss."
        )
        print(hanging(closing, 0))
    for failure in failures:
        out.print(f"[red]failed[/] {escape(str(failure))}", soft_wrap=True)
    for dist in skipped:
        out.print(f"[dim]left out by the environment: {escape(dist)}[/]")
    return status


def run_describe(arguments: argparse.Namespace) -> int:
    """Print one hook, or every level of an expression."""
    if arguments.json:
        levels = [{**as_dict(spec), "given": given} for spec, given in REGISTRY.levels(arguments.name, arguments.kind)]
        print(json.dumps(levels[0] if len(levels) == 1 else {"expression": arguments.name, "levels": levels}, indent=2))
    else:
        print(block(hooks.describe(arguments.name, arguments.kind)))
    return 0


def as_dict(spec: HookSpec) -> dict[str, Any]:
    """Return a spec as plain data for JSON. The keys are the fields of `HookSpec`."""
    plain = {**asdict(spec), "capabilities": sorted(spec.capabilities), "aliases": list(spec.aliases)}
    plain["needs"] = {name: list(v) if isinstance(v, tuple) else v for name, v in plain["needs"].items() if v}
    if spec.options is not None:
        plain["options"] = {
            name: {"default": o.default, "accepts": o.accepts(), "doc": o.doc, "brings": sorted(o.brings)}
            for name, o in spec.options.items()
        }
    return plain
