"""`doctor`: checks that everything installed is usable.

Loads every plugin and every target, and tries each hook on one gloo rank. Finds mistakes that no other command reports:
an import of torch during the listing of hooks, a misspelt group or function name, an entry point added after an
editable install.
"""

import argparse
import importlib.util
import json
import tomllib
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ch_core import plain
from ch_run import smoke
from commhooks import (
    ADAPTERS,
    REGISTRY,
    CommHooksError,
    HookSpec,
    Node,
    Progress,
    block,
    editable_roots,
    entries,
    load_target,
    package_of,
    parse,
    unparse,
)
from commhooks import nodes as nodes_of


def set_up(parser: argparse.ArgumentParser) -> Callable[[argparse.Namespace], int]:
    """Add the options of the command."""
    parser.add_argument("name", nargs="?", help="try this hook or expression only")
    parser.add_argument("-v", "--verbose", action="store_true", help="print tracebacks")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds allowed for one hook (default 60)")
    parser.add_argument("--no-smoke", action="store_true", help="load only; start no process group")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    return run


def run(arguments: argparse.Namespace) -> int:
    """Print all checks and their results. Return 1 if any failed."""
    plugins = [asdict(plugin) for plugin in REGISTRY.plugins()]  # first: later imports load torch
    problems = [
        f"{plugin['dist']} imports torch while hooks are listed" for plugin in plugins if plugin["imported_torch"]
    ]
    problems += _uninstalled_entry_points()
    hooks = _hooks(arguments)
    commands, targets = ([], []) if arguments.name else (_commands(), _targets())
    failures = [asdict(failure) for failure in REGISTRY.failures()]
    ok = not failures and not problems and not any(each["status"] == "failed" for each in [*hooks, *commands, *targets])
    found = {
        "ok": ok,
        "plugins": plugins,
        "hooks": hooks,
        "commands": commands,
        "targets": targets,
        "failures": failures,
        "problems": problems,
    }
    if arguments.json:
        print(json.dumps(found, indent=2))
    else:
        _show(found, arguments.verbose)
    return 0 if ok else 1


def _hooks(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Return every hook with a status: ok, failed, loaded (not tried), or unusable (its needs are not met)."""
    rows, tried, nodes = [], [], []
    for spec, asked in _asked(arguments.name):
        row: dict[str, Any] = {
            "id": spec.id,
            "kind": spec.kind,
            "example": unparse(asked) if asked is not None else spec.example,
            "status": "loaded",
            "why": "",
        }
        rows.append(row)
        try:
            for target in filter(None, (spec.hook, spec.state)):
                REGISTRY.load(target, spec)
            REGISTRY.target(spec)
        except CommHooksError as error:
            row.update(status="failed", why=str(error))
            continue
        reasons = spec.needs.unmet(spec.name, {"backend": "gloo", "device": "cpu", "dtype": "float32"})
        node = asked if asked is not None else _node(spec)
        if reasons:
            row.update(status="unusable", why="; ".join(reasons))
        elif spec.kind == "fsdp":
            row.update(why="FSDP1 hooks are loaded, not run")
        elif spec.kind == "outer":
            row.update(why="outer optimizers are loaded, not run")
        elif isinstance(node, str):
            row.update(status="failed", why=node)
        elif absent := [inner["hook"] for inner in nodes_of(node)[1:] if not REGISTRY.list_hooks(inner["hook"])]:
            row.update(why=f"its example needs {', '.join(absent)}, which is not installed")
        elif smoke.MODEL not in REGISTRY.adapters():
            row.update(
                why=f"not run: {package_of(ADAPTERS, smoke.MODEL)}, which has the adapter for it, is not installed"
            )
        elif not arguments.no_smoke:
            tried.append(row)
            nodes.append(node)
    with Progress("doctor", len(tried)) as tell:
        for row, why in zip(tried, smoke.problems(nodes, arguments.timeout), strict=True):
            row.update(status="failed" if why else "ok", why=why)
            tell(f"tried {row['id']}")
    return rows


def _asked(name: str | None) -> list[tuple[HookSpec, Node | None]]:
    """Return the hooks to try, each with the expression to try it as, or None for its own example.

    Raises:
        UnknownHookError, AmbiguousHookError, HookConfigError: `name` is not a usable expression.
    """
    if name is None:
        return [(spec, None) for spec in REGISTRY.specs()]
    [(spec, given), *inside] = REGISTRY.levels(name)
    return [(spec, parse(name) if given or inside else None)]


def _commands() -> list[dict[str, Any]]:
    """Return every command of a package with a status: loaded (it is not run), or failed."""
    rows = []
    for command in REGISTRY.commands():
        row = {"id": command.id, "status": "loaded", "why": ""}
        rows.append(row)
        try:
            REGISTRY.command(command.name)
        except CommHooksError as error:
            row.update(status="failed", why=str(error))
    return rows


def _targets() -> list[dict[str, Any]]:
    """Return the adapters and wrappers that plugins name, with a status. Training would load them at their first use."""
    named: list[tuple[str, str, str]] = []
    for plugin, pairs in REGISTRY.ask("commhooks_adapter"):
        named += [(plugin, f"adapter of {cls}", target) for cls, target in pairs]
    for plugin, pairs in REGISTRY.ask("commhooks_local_gradients"):
        named += [(plugin, f"local gradients of {cls}", target) for cls, target in pairs]
    for plugin, wrapped in REGISTRY.ask("commhooks_wraps"):
        named += [(plugin, "wraps", target) for target in wrapped]
    return [{"id": f"{plugin}: {use} = {target}"} | _loaded(plugin, use, target) for plugin, use, target in named]


def _loaded(plugin: str, use: str, target: str) -> dict[str, str]:
    top = target.partition(":")[0].partition(".")[0]
    if use == "wraps" and importlib.util.find_spec(top) is None:
        return {"status": "loaded", "why": f"{top} is not installed: there is nothing to wrap"}
    try:
        found = load_target(target, f"{plugin} ({use})")
    except CommHooksError as error:
        return {"status": "failed", "why": str(error)}
    if not callable(found):
        return {"status": "failed", "why": f"{target!r} is a {type(found).__name__}, not callable"}
    return {"status": "loaded", "why": ""}


def _node(spec: HookSpec) -> Node | str:
    """Return the hook's example, pinned to its provider, or an error message on the example."""
    try:
        node = parse(spec.example)
    except CommHooksError as error:
        return f"its example {spec.example!r} is not an expression: {error}"
    if node["hook"] in spec.names:
        node["provider"] = spec.provider
    return node


def _uninstalled_entry_points() -> list[str]:
    """Return entry points in the source of an editable install that its installed metadata lacks."""
    seen = {(entry.dist, entry.group, entry.name, entry.value.replace(" ", "")) for entry in entries("commhooks")}
    problems = []
    for dist, root in sorted(editable_roots().items()):
        project = Path(root, "pyproject.toml")
        if not project.is_file():
            continue
        groups = tomllib.loads(project.read_text()).get("project", {}).get("entry-points", {})
        for group, lines in groups.items():
            for name, value in lines.items():
                ours = group == "commhooks" or group.startswith("commhooks.")
                if ours and (dist, group, name, value.replace(" ", "")) not in seen:
                    problems.append(
                        f"{dist}: pyproject.toml has {group}: {name} = {value}, the installed metadata lacks it; "
                        "run pip install -e again"
                    )
    return problems


def _show(found: dict[str, Any], verbose: bool) -> None:
    for plugin in found["plugins"]:
        print(f"{plugin['dist']:<14} {plugin['version']:<8} {plugin['seconds'] * 1e3:>7.1f} ms to import")
    print()
    longest = max((len(hook["id"]) for hook in found["hooks"]), default=0)
    for hook in found["hooks"]:
        print(block(f"{hook['status']:<9} {hook['id']:<{longest}}  {hook['kind']}, {hook['example']}"))
    reasons: dict[tuple[str, str], list[str]] = {}
    for each in [*found["hooks"], *found["commands"], *found["targets"]]:
        if each["why"]:
            reasons.setdefault((each["status"], each["why"]), []).append(each["id"])
    for (status, why), ids in reasons.items():
        line = f"{status}  {', '.join(ids)}: {why}"
        # Users paste errors into issues, in one line.
        print("\n" + (block(line) if status == "loaded" else plain(line)))
    for failure in found["failures"]:
        where = f"{failure['dist']} {failure['version']} ({failure['entry']}, {failure['phase']})"
        print(plain(f"\nfailed  {where}: {failure['error']}"))
        if verbose and failure["traceback"]:
            print(plain(failure["traceback"]))
    for problem in found["problems"]:
        print(f"\nproblem  {problem}")
    print(f"\n{_closing(found)}")


def _closing(found: dict[str, Any]) -> str:
    """Return the last line, with the number of hooks that ran.

    >>> rows = [{"status": "ok"}, {"status": "ok"}, {"status": "loaded"}]
    >>> _closing({"ok": True, "hooks": rows})
    '2 hooks ran, 1 was only loaded, no problem found'
    """
    if not found["ok"]:
        return "something is wrong, see above"
    counts = Counter(hook["status"] for hook in found["hooks"])
    ran, loaded, unusable = counts["ok"], counts["loaded"], counts["unusable"]
    parts = [f"{ran} hook{'s' * (ran != 1)} ran"]
    parts += [f"{loaded} {'was' if loaded == 1 else 'were'} only loaded"] if loaded else []
    parts += [f"{unusable} cannot be used here"] if unusable else []
    return f"{', '.join(parts)}, no problem found"
