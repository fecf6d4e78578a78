"""The registry: names to hooks.

One snapshot of what is installed, made at the first lookup and kept until `refresh()`, plus what
`register` added in this process. Lookups never change it. All functions are safe to call from several
threads.
"""

import difflib
import fnmatch
import logging
import threading
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from commhooks.errors import (
    AmbiguousHookError,
    HookConfigError,
    PluginLoadError,
    UnknownHookError,
)
from commhooks.registry.commands import Command
from commhooks.registry.discovery import Discovery, PluginInfo, discover, load_target
from commhooks.registry.known_names import KNOWN
from commhooks.registry.metadata import how_to_install, normalize
from commhooks.registry.specs import KINDS, HookSpec, PluginFailure

LOGGER = logging.getLogger("commhooks")

LOCAL = "local"
"""The provider of hooks that `register` added in this process."""


class Registry:
    """The hooks of one process. The module functions of `commhooks` use one shared instance.

    Args:
        scan: makes the snapshot; tests give their own.
    """

    def __init__(self, scan: Callable[[], Discovery] = discover) -> None:
        self._scan = scan
        self._lock = threading.RLock()
        self._found: Discovery | None = None
        self._local: dict[tuple[str, str], HookSpec] = {}
        self._objects: dict[tuple[str, str], object] = {}

    def snapshot(self) -> Discovery:
        """What the scan found; scans at the first call."""
        with self._lock:
            if self._found is None:
                self._found = self._scan()
            return self._found

    def refresh(self) -> None:
        """Forget the scan, so that the next lookup sees what was installed since. `register`ed hooks stay."""
        with self._lock:
            self._found = None

    def ask(self, question: str, **arguments: object) -> list[tuple[str, Any]]:
        """Every plugin's answer to one of the `hookspecs`, by plugin name, in a fixed order.

        A plugin that raises gives no answer and one logged warning: it must not silence the others.
        """
        answers = []
        implementations = getattr(self.snapshot().manager.hook, question).get_hookimpls()
        for each in sorted(implementations, key=lambda impl: str(impl.plugin_name)):
            try:
                answers.append((each.plugin_name, each.function(*(arguments[name] for name in each.argnames))))
            except Exception as error:
                LOGGER.warning("plugin %s failed to answer %s: %r", each.plugin_name, question, error)
        return answers

    def failures(self) -> list[PluginFailure]:
        """Plugins that could not be used, with cause and traceback."""
        return list(self.snapshot().failures)

    def plugins(self) -> list[PluginInfo]:
        """Plugin modules that loaded, with their import time."""
        return list(self.snapshot().plugins)

    def specs(self) -> list[HookSpec]:
        """Every hook, ordered by kind, name, provider: the same order on every rank."""
        with self._lock:
            return sorted([*self.snapshot().specs, *self._local.values()], key=HookSpec.sort_key)

    def commands(self) -> list[Command]:
        """The subcommands that packages add to the command line, ordered by name, then provider. Imports none."""
        return sorted(self.snapshot().commands, key=lambda command: (command.name, command.provider))

    def command(self, command: Command) -> Callable[[list[str]], int | None]:
        """The function of a subcommand, imported now.

        Raises:
            PluginLoadError: naming the provider and the cause.
        """
        owner = f"{command.provider} {command.version} (command {command.name!r})"
        found = load_target(command.target, owner)
        if not callable(found):
            raise PluginLoadError(f"{owner}: {command.target!r} is a {type(found).__name__}, not callable")
        main: Callable[[list[str]], int | None] = found
        return main

    def list_hooks(self, pattern: str = "*", *, kind: str | None = None, provider: str | None = None) -> list[HookSpec]:
        """The specs whose name or alias matches a shell pattern, optionally of one kind or provider.

        Imports no hook, and no torch.
        """
        _check_kind(kind)
        return [
            spec
            for spec in self.specs()
            if any(fnmatch.fnmatchcase(name, pattern) for name in spec.names)
            and (kind is None or spec.kind == kind)
            and (provider is None or spec.provider == normalize(provider))
        ]

    def resolve(self, name: str, *, kind: str | None = None, provider: str | None = None) -> HookSpec:
        """The one spec that a name stands for.

        Args:
            name: a hook's name or alias, or `provider/name`.
            kind: one of reduction, ddp, fsdp, wrapper; by default whatever DDP can use, else FSDP1's.
            provider: the distribution to take it from.

        Raises:
            UnknownHookError, AmbiguousHookError, HookConfigError (unknown kind).
        """
        _check_kind(kind)
        asked = name
        if "/" in name:
            provider, _, name = name.partition("/")
        found = [spec for spec in self.specs() if name in spec.names]
        if provider is not None:
            found = [spec for spec in found if spec.provider == normalize(provider)]
        of_kind = [spec for spec in found if kind is None or spec.kind == kind]
        if kind is None:
            of_kind = [spec for spec in found if spec.kind != "fsdp"] or found
        if not of_kind:
            raise UnknownHookError(self._unknown(asked, name, kind, found))
        if len(of_kind) > 1:
            raise AmbiguousHookError(_ambiguous(asked, name, of_kind))
        return of_kind[0]

    def _unknown(self, asked: str, name: str, kind: str | None, elsewhere: list[HookSpec]) -> str:
        what = f"unknown hook {asked!r}" + (f" of kind {kind!r}" if kind else "")
        lines = []
        if elsewhere:
            ids = ", ".join(f"{spec.id} ({spec.kind})" for spec in elsewhere)
            lines.append(f"the name exists as {ids}")
        names = {each for spec in self.specs() for each in spec.names}
        if not elsewhere:
            close = difflib.get_close_matches(name, sorted(names | set(KNOWN)), 1)
            suggested = close[0] if close and name not in KNOWN and close[0] != name else None
            what += f"; did you mean {suggested!r}?" if suggested else ""
            wanted = name if name in KNOWN else suggested
            if wanted in KNOWN and wanted not in names:
                packages = " or ".join(KNOWN[wanted])
                lines.append(
                    f"{wanted!r} comes with {packages}, not installed here: {how_to_install(KNOWN[wanted][0])}"
                )
            elif wanted is None or name in names:
                others = ", ".join(spec.id for spec in self.specs() if name in spec.names)
                lines.append(f"the name exists as {others}" if others else f"installed: {', '.join(sorted(names))}")
        broken = self.failures()
        if broken:
            some = "1 plugin" if len(broken) == 1 else f"{len(broken)} plugins"
            lines.append(f"{some} failed to load and may have provided it: " + "; ".join(map(str, broken)))
        skipped = self.snapshot().skipped
        if skipped:
            lines.append(f"left out by COMMHOOKS_DISABLE or COMMHOOKS_PLUGINS: {', '.join(skipped)}")
        lines.append("python -m commhooks list shows what is available")
        return "\n  ".join([what, *lines])

    def load(self, target: str, spec: HookSpec) -> Any:
        """Another object of a spec's provider (its plain hook, its state class), imported now.

        Raises:
            PluginLoadError: naming the provider and the cause.
        """
        return load_target(target, _owner(spec))

    def target(self, spec: HookSpec) -> Any:
        """The object a spec describes, imported now.

        Raises:
            PluginLoadError: it failed to import, or is not callable.
        """
        key = (spec.kind, spec.name)
        local = spec.provider == LOCAL and key in self._objects
        found = self._objects[key] if local else self.load(spec.target, spec)
        if not callable(found):
            raise PluginLoadError(
                f"{_owner(spec)}: the target {spec.target!r} is a {type(found).__name__}, not callable"
            )
        return found

    def register(self, spec: HookSpec, target: Callable[..., Any] | None = None, *, overwrite: bool = False) -> None:
        """Add a hook for this process, for notebooks and tests. Packages use entry points instead.

        Args:
            spec: its provider becomes `"local"`.
            target: the object itself; by default `spec.target` is imported when the hook is asked for.
            overwrite: take the place of an earlier `register` of the same kind and name.

        Raises:
            AmbiguousHookError: a hook of this kind has the name, or one of the aliases, already.
            HookConfigError: ``spec`` is not a HookSpec.
        """
        if not isinstance(spec, HookSpec):
            raise HookConfigError(
                f"register takes a HookSpec, got {spec!r}: register(HookSpec('mine', 'reduction', 'module:Mine', 'what "
                "it does'), Mine)"
            )
        with self._lock:
            key = (spec.kind, spec.name)
            for other in self.specs():
                replaced = (other.kind, other.name) == key and other.provider == LOCAL
                shared = {*spec.names} & {*other.names}
                if shared and other.kind == spec.kind and not (overwrite and replaced):
                    raise AmbiguousHookError(
                        f"the {spec.kind} {min(shared)!r} exists already ({other.id}); choose another name"
                        + (", or pass overwrite=True" if replaced else "")
                    )
            self._local[key] = replace(spec, provider=LOCAL, version="0", origin="commhooks.register")
            self._objects.pop(key, None)
            if target is not None:
                self._objects[key] = target

    def unregister(self, name: str, kind: str | None = None) -> None:
        """Remove what `register` added.

        Raises:
            UnknownHookError: nothing of that name was registered in this process.
        """
        with self._lock:
            keys = [key for key in self._local if key[1] == name and kind in (None, key[0])]
            if not keys:
                names = ", ".join(sorted({key[1] for key in self._local})) or "none"
                raise UnknownHookError(f"{name!r} was not registered in this process; registered: {names}")
            for key in keys:
                self._local.pop(key)
                self._objects.pop(key, None)


def _owner(spec: HookSpec) -> str:
    return f"{spec.provider} {spec.version} (hook {spec.name!r})".replace("  ", " ")


def _check_kind(kind: str | None) -> None:
    if kind is not None and kind not in KINDS:
        raise HookConfigError(f"unknown kind {kind!r}; legal: {', '.join(KINDS)}")


def _ambiguous(asked: str, name: str, found: list[HookSpec]) -> str:
    lines = [f"hook {asked!r} is ambiguous: " + ", ".join(f"{s.id} {s.version} ({s.kind})" for s in found)]
    if len({spec.provider for spec in found}) > 1:
        first = found[0]
        lines.append(f"name the provider: get({first.id!r}), or in an expression {name}(provider={first.provider!r})")
    if len({spec.kind for spec in found}) > 1:
        lines.append(f"or name the kind: get({asked!r}, kind={found[0].kind!r})")
    return "\n  ".join(lines)


def warn_if_deprecated(spec: HookSpec) -> None:
    """Say once per place of call that a hook has a successor."""
    if spec.stability == "deprecated":
        successor = f"; use {spec.replaced_by!r}" if spec.replaced_by else ""
        warnings.warn(f"hook {spec.id!r} is deprecated{successor}", DeprecationWarning, stacklevel=3)


REGISTRY = Registry()


def adapters(registry: Registry | None = None) -> Mapping[str, str]:
    """Adapter factories (`"module:attr"`) by fully qualified model class, from every plugin.

    Raises:
        AmbiguousHookError: two plugins claim one class.
    """
    return _claimed("commhooks_adapter", registry)


def manager_adapters(registry: Registry | None = None) -> Mapping[str, str]:
    """The same of managers: what reduces between the groups of one, by the manager's class.

    Raises:
        AmbiguousHookError: two plugins claim one class.
    """
    return _claimed("commhooks_manager", registry)


def _claimed(question: str, registry: Registry | None) -> dict[str, str]:
    found: dict[str, str] = {}
    for _, pairs in (registry or REGISTRY).ask(question):
        for cls, factory in pairs:
            if found.setdefault(cls, factory) != factory:
                raise AmbiguousHookError(f"two adapters claim {cls}: {found[cls]} and {factory}; remove one plugin")
    return found
