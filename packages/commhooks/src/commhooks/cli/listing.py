"""`list` and `describe`. They import only hooks that declare nothing but a line of an entry point."""

import argparse
import json
import textwrap
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

from ch_core import PluginLoadError, plain
from commhooks.api import hooks
from commhooks.cli.text import block, hanging, width
from commhooks.registry.registry import REGISTRY
from commhooks.registry.spec import GROUPS, KINDS, HookSpec, PluginFailure

Run = Callable[[argparse.Namespace], int]


def list_(parser: argparse.ArgumentParser) -> Run:
    """List the installed hooks by use, and plugins that failed."""
    help = "part of a name or summary, a package, or a shell pattern of names"
    parser.add_argument("word", nargs="?", default="*", help=help)
    _add_common(parser)
    return run_list


def describe(parser: argparse.ArgumentParser) -> Run:
    """Describe a hook: use, cost, options, requirements."""
    parser.add_argument("name", help="name, alias, provider/name, or an expression")
    _add_common(parser)
    return run_describe


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kind", help=f"{', '.join(KINDS[:-1])} or {KINDS[-1]}")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def summarised(specs: list[HookSpec]) -> tuple[list[HookSpec], list[PluginFailure]]:
    """Return the hooks with their summaries, and the entry points that fail to load. Docstrings replace missing summaries."""
    shown, failures = [], []
    for spec in specs:
        if not spec.summary:
            try:
                text = hooks.docstring(spec)
            except PluginLoadError as error:
                entry = spec.origin.partition(" = ")[0]
                failures.append(PluginFailure(spec.provider, spec.version, entry, "import", str(error)))
                continue
            first = text.partition(". ")[0].removesuffix(".")
            spec = replace(spec, summary=textwrap.shorten(first, 100, placeholder=" ...") or "(no summary)")
        shown.append(spec)
    return shown, failures


def found_by(word: str, kind: str | None) -> tuple[list[HookSpec], list[PluginFailure]]:
    """Return the hooks that match a shell pattern of names, contain a word, or come from the package of this name.

    A word is looked for in names, aliases and summaries. The failures are those of :func:`summarised`.
    """
    if any(sign in word for sign in "*?["):
        return summarised(hooks.list_hooks(word, kind=kind))
    word = word.lower()
    specs, failures = summarised(hooks.list_hooks(kind=kind))
    return [
        spec
        for spec in specs
        if word == spec.provider.lower() or any(word in text.lower() for text in (*spec.names, spec.summary))
    ], failures


def by_use(specs: list[HookSpec]) -> list[tuple[str, list[HookSpec]]]:
    """Return the headings of `GROUPS` that have hooks, each with its hooks, recommended ones first."""
    groups = [
        (heading, sorted((spec for spec in specs if spec.group == group), key=lambda spec: not spec.recommended))
        for group, heading in GROUPS.items()
    ]
    return [(heading, some) for heading, some in groups if some]


def run_list(arguments: argparse.Namespace) -> int:
    """Print the hooks, those that cannot be loaded with a mark, and the failed plugins that may have provided others.

    Returns:
        1 if no hook matches or a plugin failed, else 0.
    """
    specs, broken = found_by(arguments.word, arguments.kind)
    failures = [*hooks.failures(), *broken]
    skipped = REGISTRY.snapshot().skipped
    status = 1 if failures or not specs else 0
    if arguments.json:
        found = {
            "hooks": [{**as_dict(spec), "unusable": spec.unusable()} for spec in specs],
            "failures": [asdict(f) for f in failures],
            "skipped": skipped,
        }
        print(json.dumps(found, indent=2))
        return status
    if not specs:
        kind = f" of kind {arguments.kind}" if arguments.kind else ""
        print(f"no hook{kind} matches {arguments.word!r}; commhooks list shows all")
    unusable = {spec.id: reasons for spec in specs if (reasons := spec.unusable())}
    names = max((len(spec.name) for spec in specs), default=0)
    providers = max((len(spec.provider) for spec in specs), default=0)
    indent = min(2 + names + 2 + providers + 2, width() // 2)  # one column of summaries for all groups
    for heading, some in by_use(specs):
        print(heading)
        for spec in some:
            also = f" (also {', '.join(spec.aliases)})" if spec.aliases else ""
            mark = "!" if spec.id in unusable else "*" if spec.recommended else " "
            row = f"{mark} {spec.name:<{names}}  {spec.provider:<{providers}}  {spec.summary}{also}"
            print(hanging(row, indent))
        print()
    if any(spec.recommended for spec in specs):
        closing = (
            "A star marks the hooks to try first in each group. commhooks describe NAME says when to use a hook, and its cost in "
            "loss."
        )
        print(hanging(closing, 0))
    for hook, reasons in unusable.items():
        print(hanging(f"! {hook} cannot be used here: {'; '.join(reasons)}", 2))
    for failure in failures:
        print(plain(f"failed {failure}"))  # not broken into lines, because users paste it into issues
    for dist in skipped:
        print(f"left out by the environment: {dist}")
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
