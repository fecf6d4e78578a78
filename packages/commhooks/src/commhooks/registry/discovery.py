"""Finds the installed plugins. A plugin that fails leaves the others intact.

pluggy keeps the list of plugins, and this module loads them. pluggy's own loader would stop at the first module that
fails to import, and silently drop the second of two entries with one name. Entry points are

- `commhooks`: a light module with `@hookimpl` functions;
- `commhooks.<kind>`: one hook per line;
- `commhooks.commands`: one subcommand per line.

Every failure becomes a `PluginFailure`, also an exit or a panic of a plugin's code, and broken metadata of any distribution.
With `COMMHOOKS_STRICT=1` the first one raises. `COMMHOOKS_DISABLE=dist,dist`
leaves distributions out. `COMMHOOKS_PLUGINS=dist,dist` allows only these and this project's own.
"""

import difflib
import importlib
import inspect
import os
import sys
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any

import pluggy

from ch_core import HookConfigError, PluginLoadError, log
from commhooks.registry import hookspecs
from commhooks.registry.distributions import Entry, entries, normalize
from commhooks.registry.packages import PACKAGES
from commhooks.registry.spec import API, KINDS, Command, HookSpec, PluginFailure

GROUP = hookspecs.PROJECT
COMMANDS = f"{GROUP}.commands"
_GROUPS = (GROUP, *(f"{GROUP}.{kind}" for kind in KINDS), COMMANDS)


@dataclass(frozen=True, slots=True)
class PluginInfo:
    """One loaded plugin module: its import time, and True if its import loaded torch."""

    dist: str
    version: str
    entry: str
    seconds: float
    imported_torch: bool


@dataclass(slots=True)
class Discovery:
    """The result of one scan. Only this module changes it.

    Attributes:
        strict: True if the first failure raises.
        modules: the entry of each plugin module, by its name in the manager.
        answers: of the functions that were asked.
    """

    manager: pluggy.PluginManager
    strict: bool = False
    specs: list[HookSpec] = field(default_factory=list)
    commands: list[Command] = field(default_factory=list)
    failures: list[PluginFailure] = field(default_factory=list)
    plugins: list[PluginInfo] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    modules: dict[str, Entry] = field(default_factory=dict)
    answers: dict[str, list[tuple[str, Any]]] = field(default_factory=dict)

    def fail(self, entry: Entry, phase: str, error: BaseException | str) -> None:
        """Record that an entry cannot be used.

        Raises:
            PluginLoadError: this is strict.
        """
        text, trace = (error, "") if isinstance(error, str) else (described(error), _traceback(error))
        where = f"{entry.group}: {entry.name}".removeprefix(": ")
        self.failures.append(PluginFailure(entry.dist, entry.version, where, phase, text, trace))
        if self.strict:
            raise PluginLoadError(f"COMMHOOKS_STRICT is set and a plugin failed: {self.failures[-1]}\n{trace}")

    def ask(self, function: str) -> list[tuple[str, Any]]:
        """Call a function of every plugin once, and return the checked answers by plugin name, in a fixed order.

        A plugin that fails gives no answer, a record, and one logged warning.
        """
        if function not in self.answers:
            made = self.answers[function] = []
            implementations = getattr(self.manager.hook, function).get_hookimpls()
            for each in sorted(implementations, key=lambda one: str(one.plugin_name)):
                try:
                    made.append((each.plugin_name, hookspecs.checked(function, each.function())))
                except KeyboardInterrupt:
                    raise
                except BaseException as error:
                    self.fail(self.modules[each.plugin_name], function, error)
                    log.warning("a plugin failed: %s", self.failures[-1])
        return self.answers[function]


def described(error: BaseException) -> str:
    """Return type and text of an exception of a plugin, whose text may raise, too.

    >>> described(KeyError("x"))
    "KeyError: 'x'"
    """
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return type(error).__name__


def _traceback(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


def discover(environ: Mapping[str, str] = os.environ) -> Discovery:
    """Scan the installed distributions once.

    Raises:
        PluginLoadError: the first failure, only with `COMMHOOKS_STRICT=1` (for a plugin's own CI).
    """
    manager = pluggy.PluginManager(GROUP)
    manager.add_hookspecs(hookspecs)
    found = Discovery(manager, environ.get("COMMHOOKS_STRICT", "") not in ("", "0"))
    installed = entries(GROUP)
    for entry in installed:
        if not _allowed(entry.dist, environ):
            if entry.dist not in found.skipped:
                found.skipped.append(entry.dist)
        elif entry.error is not None:
            found.fail(entry, "metadata", f"{described(entry.error)}; reinstall {entry.dist}, or remove this folder")
        elif entry.group == GROUP:
            _load_module(found, entry)
        elif entry.group == COMMANDS:
            _add_command(found, entry)
        else:
            _add_line(found, entry)
    found.specs.sort(key=HookSpec.sort_key)
    return found


def _allowed(dist: str, environ: Mapping[str, str]) -> bool:
    def names(variable: str) -> set[str]:
        return {normalize(name.strip()) for name in environ.get(variable, "").split(",") if name.strip()}

    if dist in names("COMMHOOKS_DISABLE"):
        return False
    return "COMMHOOKS_PLUGINS" not in environ or dist in PACKAGES or dist in names("COMMHOOKS_PLUGINS")


def _load_module(found: Discovery, entry: Entry) -> None:
    """Import a plugin module, register it with pluggy and collect its specs, or do nothing of this."""
    had_torch, start = "torch" in sys.modules, time.perf_counter()
    name, phase = f"{entry.dist}:{entry.group}:{entry.name}", "import"
    try:
        plugin = _import(entry.value)
        seconds = time.perf_counter() - start
        loaded_torch = not had_torch and "torch" in sys.modules
        found.plugins.append(PluginInfo(entry.dist, entry.version, entry.name, seconds, loaded_torch))
        phase = "register"
        unmarked = _unmarked(plugin)
        found.manager.register(plugin, name=name)
        found.manager.check_pending()  # refuses a misspelt function name, which pluggy would never call
        phase = "commhooks_specs"
        implementations = found.manager.hook.commhooks_specs.get_hookimpls()
        own = [each for each in implementations if each.plugin is plugin]
        specs = [spec for each in own for spec in hookspecs.checked(phase, each.function())]
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a plugin that exits or panics must not end its host
        if found.manager.has_plugin(name):
            found.manager.unregister(name=name)
        return found.fail(entry, phase, error)
    found.modules[name] = entry
    for function in unmarked:
        found.fail(entry, "register", f"{function}() lacks the @hookimpl mark, so it is never called")
    for spec in specs:
        _add(found, entry, spec)


def _import(target: str) -> Any:
    """Return the module, or the object in a module, that `"module"` or `"module:attribute"` names."""
    module, _, path = target.partition(":")
    found: Any = importlib.import_module(module)
    for part in filter(None, path.split(".")):
        found = getattr(found, part)
    return found


def _unmarked(plugin: object) -> list[str]:
    """Return the functions that are named like ours but lack the mark. pluggy would silently ignore them."""
    if not isinstance(plugin, ModuleType):
        return []
    return [
        name
        for name, value in sorted(vars(plugin).items())
        if name.startswith(f"{GROUP}_") and inspect.isroutine(value) and not hasattr(value, f"{GROUP}_impl")
    ]


def _add(found: Discovery, entry: Entry, spec: HookSpec) -> None:
    if spec.api != API:
        advice = "upgrade commhooks" if isinstance(spec.api, int) and spec.api > API else f"upgrade {entry.dist}"
        found.fail(entry, "api", f"{spec.name} uses plugin API {spec.api}, this commhooks supports {API}; {advice}")
    elif any((s.kind, s.name, s.provider) == (spec.kind, spec.name, entry.dist) for s in found.specs):
        found.fail(entry, "name", f"{entry.dist} provides the {spec.kind} {spec.name!r} twice; the first is used")
    else:
        origin = f"{entry.group}: {entry.name} = {entry.value}"
        found.specs.append(replace(spec, provider=entry.dist, version=entry.version, origin=origin))


def _add_command(found: Discovery, entry: Entry) -> None:
    """Add a subcommand. Imports nothing of it."""
    try:
        found.commands.append(Command(entry.name, entry.value.replace(" ", ""), entry.dist, entry.version))
    except HookConfigError as error:
        found.fail(entry, "name", error)


def _add_line(found: Discovery, entry: Entry) -> None:
    """Add the hook of a line. Imports nothing of it, so it has no summary. `list` reads its docstring."""
    if entry.group not in _GROUPS:
        close = difflib.get_close_matches(entry.group, _GROUPS, 1, 0.5)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        return found.fail(
            entry, "group", f"{entry.group!r} is not an entry-point group of commhooks: {', '.join(_GROUPS)}{hint}"
        )
    kind, target = entry.group.removeprefix(f"{GROUP}."), entry.value.replace(" ", "")
    try:
        spec = HookSpec(entry.name, kind, target, summary="")
    except HookConfigError as error:
        return found.fail(entry, "name", error)
    _add(found, entry, spec)


def load_target(target: str, owner: str = "the target") -> Any:
    """Return the object that `"module:attribute"` names.

    Args:
        target: to import.
        owner: package that names the target, for the error.

    Raises:
        PluginLoadError: naming owner, target and cause, which is chained.

    Example:
        >>> load_target("math:pi")
        3.141592653589793
    """
    try:
        return _import(target)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a module that exits or panics must not end its host
        raise PluginLoadError(f"{owner}: {target!r} failed to load: {described(error)}") from error
