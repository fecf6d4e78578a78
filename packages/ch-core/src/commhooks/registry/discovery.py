"""Finds the installed plugins, each load isolated from the others.

pluggy holds the list of who contributes; the loading is ours, because pluggy's own loader stops at the first
module that fails to import and silently drops the second of two equally named entries. Entry points are of two
kinds: a light module with `@hookimpl` functions (group `commhooks`), and one hook per line (groups `commhooks.<kind>`), for
which the host makes one small plugin per distribution. Subcommands are lines too (`commhooks.commands`).
Whatever goes wrong becomes a `PluginFailure`; nothing here raises unless `COMMHOOKS_STRICT=1` asks for it.

Environment: `COMMHOOKS_DISABLE=dist,dist` leaves distributions out; `COMMHOOKS_PLUGINS=dist,dist` lets in
only these besides this project's own (empty: only this project's own).
"""

import difflib
import importlib
import os
import sys
import time
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import groupby
from types import ModuleType
from typing import Any

import pluggy

from commhooks.errors import HookConfigError, PluginLoadError
from commhooks.registry import hookspecs
from commhooks.registry.commands import GROUP as COMMANDS
from commhooks.registry.commands import Command
from commhooks.registry.known_names import FIRST_PARTY
from commhooks.registry.metadata import Entry, entries, normalize
from commhooks.registry.specs import API, KINDS, HookSpec, PluginFailure

GROUP = hookspecs.PROJECT
_GROUPS = (GROUP, *(f"{GROUP}.{kind}" for kind in KINDS), COMMANDS)


@dataclass(frozen=True, slots=True)
class PluginInfo:
    """One loaded entry: how long its import took, and whether it was the one that pulled torch in."""

    dist: str
    version: str
    entry: str
    seconds: float
    imported_torch: bool


@dataclass(slots=True)
class Discovery:
    """The outcome of one scan. Filled here, read-only for everybody else."""

    manager: pluggy.PluginManager
    specs: list[HookSpec] = field(default_factory=list)
    commands: list[Command] = field(default_factory=list)
    failures: list[PluginFailure] = field(default_factory=list)
    plugins: list[PluginInfo] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)


def discover(environ: Mapping[str, str] = os.environ) -> Discovery:
    """Scan the installed distributions once.

    Raises:
        PluginLoadError: the first failure, only under `COMMHOOKS_STRICT=1` (for a plugin's own CI).
    """
    manager = pluggy.PluginManager(GROUP)
    manager.add_hookspecs(hookspecs)
    found = Discovery(manager)
    for dist, group in groupby(entries(GROUP), key=lambda entry: entry.dist):
        if not _allowed(dist, environ):
            found.skipped.append(dist)
            continue
        mine = list(group)
        for entry in mine:
            if entry.group == GROUP:
                _load_module(found, entry)
            elif entry.group == COMMANDS:
                _load_command(found, entry)
        _load_lines(found, [entry for entry in mine if entry.group not in (GROUP, COMMANDS)])
    found.specs.sort(key=HookSpec.sort_key)
    if found.failures and environ.get("COMMHOOKS_STRICT", "") not in ("", "0"):
        first = found.failures[0]
        raise PluginLoadError(f"COMMHOOKS_STRICT is set and a plugin failed: {first}\n{first.traceback}")
    return found


def _allowed(dist: str, environ: Mapping[str, str]) -> bool:
    def names(variable: str) -> set[str]:
        return {normalize(name.strip()) for name in environ.get(variable, "").split(",") if name.strip()}

    if dist in names("COMMHOOKS_DISABLE"):
        return False
    return "COMMHOOKS_PLUGINS" not in environ or dist in FIRST_PARTY or dist in names("COMMHOOKS_PLUGINS")


def _fail(found: Discovery, entry: Entry, phase: str, error: BaseException | str) -> None:
    if isinstance(error, BaseException):
        text, trace = f"{type(error).__name__}: {error}", "".join(traceback.format_exception(error))
    else:
        text, trace = error, ""
    found.failures.append(PluginFailure(entry.dist, entry.version, f"{entry.group}: {entry.name}", phase, text, trace))


def _load_module(found: Discovery, entry: Entry) -> None:
    """Import a plugin module, register it under a name of ours, and collect its specs: all or nothing."""
    had_torch, start = "torch" in sys.modules, time.perf_counter()
    try:
        plugin: Any = importlib.import_module(entry.value.partition(":")[0])
        for part in filter(None, entry.value.partition(":")[2].split(".")):
            plugin = getattr(plugin, part)
    except (Exception, SystemExit) as error:  # a plugin that exits at import must not end its host
        return _fail(found, entry, "import", error)
    seconds = time.perf_counter() - start
    pulled = not had_torch and "torch" in sys.modules
    found.plugins.append(PluginInfo(entry.dist, entry.version, entry.name, seconds, pulled))
    for name in _unmarked(plugin):
        _fail(found, entry, "register", f"{name}() lacks the @hookimpl mark, so it is never called")
    _register(found, entry, plugin)


def _register(found: Discovery, entry: Entry, plugin: object) -> None:
    name = f"{entry.dist}:{entry.group}:{entry.name}"
    try:
        found.manager.register(plugin, name=name)
        found.manager.check_pending()  # a misspelt hook name is otherwise accepted and never called
    except Exception as error:
        if found.manager.has_plugin(name):
            found.manager.unregister(name=name)
        return _fail(found, entry, "register", error)
    try:
        implementations = found.manager.hook.commhooks_specs.get_hookimpls()
        own: list[Any] = [impl.function for impl in implementations if impl.plugin is plugin]
        specs = [spec for function in own for spec in function()]
        for spec in specs:
            if not isinstance(spec, HookSpec):
                raise TypeError(f"commhooks_specs() must give HookSpec objects, got {type(spec).__name__}")
    except Exception as error:
        found.manager.unregister(name=name)
        return _fail(found, entry, "specs", error)
    for spec in specs:
        _add(found, entry, spec)


def _add(found: Discovery, entry: Entry, spec: HookSpec) -> None:
    if spec.api != API:
        advice = "upgrade ch-core" if isinstance(spec.api, int) and spec.api > API else f"upgrade {entry.dist}"
        _fail(
            found,
            entry,
            "api",
            f"{spec.name} speaks plugin API {spec.api}, this ch-core speaks {API}; {advice}",
        )
    elif any((s.kind, s.name, s.provider) == (spec.kind, spec.name, entry.dist) for s in found.specs):
        _fail(
            found,
            entry,
            "name",
            f"{entry.dist} provides the {spec.kind} {spec.name!r} twice; the first is used",
        )
    else:
        origin = f"{entry.group}: {entry.name} = {entry.value}"
        found.specs.append(replace(spec, provider=entry.dist, version=entry.version, origin=origin))


def _unmarked(plugin: object) -> list[str]:
    """Functions named like our hooks that pluggy would pass over in silence."""
    if not isinstance(plugin, ModuleType):
        return []
    mark = f"{GROUP}_impl"
    return [
        name
        for name, value in sorted(vars(plugin).items())
        if name.startswith(f"{GROUP}_") and callable(value) and not hasattr(value, mark)
    ]


def _load_command(found: Discovery, entry: Entry) -> None:
    """Note a subcommand. Imports nothing of it."""
    target, summary = entry.value.replace(" ", ""), entry.summary or f"from {entry.dist}"
    try:
        found.commands.append(Command(entry.name, target, entry.dist, entry.version, summary))
    except HookConfigError as error:
        _fail(found, entry, "name", error)


def _load_lines(found: Discovery, lines: list[Entry]) -> None:
    """One synthetic plugin for the simple groups of one distribution. Imports nothing of it."""
    specs = []
    for entry in lines:
        try:
            if entry.group not in _GROUPS:
                close = difflib.get_close_matches(entry.group, _GROUPS, 1, 0.5)
                hint = f"; did you mean {close[0]!r}?" if close else ""
                raise LookupError(f"nobody reads the group {entry.group!r}; groups: {', '.join(_GROUPS)}{hint}")
            kind = entry.group.removeprefix(f"{GROUP}.")
            summary = entry.summary or f"from {entry.dist}"
            specs.append((entry, HookSpec(entry.name, kind, entry.value.replace(" ", ""), summary)))
        except (LookupError, ValueError) as error:
            _fail(found, entry, "group" if entry.group not in _GROUPS else "name", error)
    if specs:
        found.manager.register(_Lines([spec for _, spec in specs]), name=f"{lines[0].dist}:lines")
    for entry, spec in specs:
        _add(found, entry, spec)


class _Lines:
    """The plugin that stands for the one-line entries of a distribution."""

    def __init__(self, specs: Iterable[HookSpec]) -> None:
        self._specs = tuple(specs)

    @hookspecs.hookimpl
    def commhooks_specs(self) -> Iterable[HookSpec]:
        return self._specs


def load_target(target: str, owner: str = "the target") -> Any:
    """The object that `"module:attr"` names.

    Raises:
        PluginLoadError: naming `owner` (who promised it), the target and the cause, which is chained.

    Example:
        >>> load_target("math:pi")
        3.141592653589793
    """
    module, _, path = target.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except Exception as error:
        raise PluginLoadError(f"{owner}: {target!r} failed to load: {type(error).__name__}: {error}") from error
    return found
