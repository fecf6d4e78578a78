"""The registry of hooks by name. Imports no torch.

The registry keeps one scan of the installed packages, made at the first lookup and dropped by `refresh()`, and the hooks
that `register` added in this process. Lookups never change it. Several threads may call it.
"""

import difflib
import fnmatch
import inspect
import textwrap
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from ch_core import AmbiguousHookError, AttachError, HookConfigError, PluginLoadError, UnknownHookError
from commhooks.registry import hookspecs
from commhooks.registry.discovery import Discovery, PluginInfo, discover, load_target
from commhooks.registry.distributions import INSTALL, NOT_INSTALLED, normalize
from commhooks.registry.expression import Node, canonical, nodes
from commhooks.registry.packages import ADAPTERS, COMMANDS, HOOKS, all_names, package_of
from commhooks.registry.spec import KINDS, OWN_COMMANDS, Command, HookSpec, PluginFailure, SetUp

LOCAL = "local"
"""Provider of the hooks that `register` added in this process."""


class Registry:
    """The hooks of one process. The functions of `commhooks` use one shared instance.

    Args:
        scan: finds the installed packages. Tests give their own.
    """

    def __init__(self, scan: Callable[[], Discovery] = discover) -> None:
        self._scan = scan
        self._lock = threading.RLock()
        self._found: Discovery | None = None
        self._local: dict[tuple[str, str], HookSpec] = {}
        self._objects: dict[tuple[str, str], object] = {}

    # -- the scan

    def snapshot(self) -> Discovery:
        """Return the scan. The first call makes it."""
        with self._lock:
            if self._found is None:
                self._found = self._scan()
            return self._found

    def refresh(self) -> None:
        """Drop the scan, so that the next lookup sees packages installed since. Hooks from `register` stay."""
        with self._lock:
            self._found = None

    def ask(self, function: str) -> list[tuple[str, Any]]:
        """Return the answers of every plugin to one of the `hookspecs`, by plugin name, in a fixed order.

        A plugin that fails, or answers what the specification does not allow, gives no answer. :meth:`failures` has it, and
        one warning is logged. The other plugins still answer.
        """
        with self._lock:
            return self.snapshot().ask(function)

    def failures(self) -> list[PluginFailure]:
        """Return the plugins that could not be used, with cause and traceback. Asks every function of every plugin."""
        for function in hookspecs.LEGAL:
            if function != "commhooks_specs":  # the scan has asked it
                self.ask(function)
        return list(self.snapshot().failures)

    def plugins(self) -> list[PluginInfo]:
        """Return the loaded plugin modules, with their import times."""
        return list(self.snapshot().plugins)

    # -- hooks

    def specs(self) -> list[HookSpec]:
        """Return every hook, ordered by kind, name, provider: the same order on every rank."""
        with self._lock:
            return sorted([*self.snapshot().specs, *self._local.values()], key=HookSpec.sort_key)

    def list_hooks(self, pattern: str = "*", *, kind: str | None = None, provider: str | None = None) -> list[HookSpec]:
        """Return the specs whose name or alias matches a shell pattern, optionally of one kind or provider."""
        _check_kind(kind)
        return [
            spec
            for spec in self.specs()
            if any(fnmatch.fnmatchcase(name, pattern) for name in spec.names)
            and (kind is None or spec.kind == kind)
            and (provider is None or spec.provider == normalize(provider))
        ]

    def resolve(self, name: str, *, kind: str | None = None, provider: str | None = None) -> HookSpec:
        """Return the one spec with this name.

        Args:
            name: a hook's name or alias, or `provider/name`.
            kind: one of `KINDS`. By default the kinds that DDP uses come before `fsdp`.
            provider: distribution to take the hook from.

        Raises:
            UnknownHookError: no hook has the name.
            AmbiguousHookError: several hooks have it.
            HookConfigError: the kind is unknown.
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

    def _unknown(self, asked: str, name: str, kind: str | None, other_kinds: list[HookSpec]) -> str:
        """Return the message for an unknown name: similar names, the package to install, and failed plugins."""
        head = f"unknown hook {asked!r}" + (f" of kind {kind!r}" if kind else "")
        lines = []
        names = {each for spec in self.specs() for each in spec.names}
        if other_kinds:
            lines.append("the name exists as " + ", ".join(f"{spec.id} ({spec.kind})" for spec in other_kinds))
        else:
            known = names | all_names(HOOKS)
            wanted = name if name in known else next(iter(difflib.get_close_matches(name, known, 1)), None)
            head += f"; did you mean {wanted!r}?" if wanted not in (None, name) else ""
            package = package_of(HOOKS, wanted) if wanted is not None and wanted not in names else None
            if package is not None:
                lines.append(f"{wanted!r} comes with {package}, not installed here: {INSTALL}")
            elif wanted is None or wanted == name:
                others = ", ".join(spec.id for spec in self.specs() if name in spec.names)
                lines.append(f"the name exists as {others}" if others else _wrapped("installed", sorted(names)))
        broken = self.failures()
        if broken:
            some = "1 plugin" if len(broken) == 1 else f"{len(broken)} plugins"
            lines.append(f"{some} failed to load and may have provided it: " + "; ".join(map(str, broken)))
        if self.snapshot().skipped:
            lines.append(f"left out by COMMHOOKS_DISABLE or COMMHOOKS_PLUGINS: {', '.join(self.snapshot().skipped)}")
        lines.append("commhooks list shows the installed hooks")
        return "\n  ".join([head, *lines])

    def load(self, target: str, spec: HookSpec) -> Any:
        """Import another object of a spec's provider: its plain hook or its state class.

        Raises:
            PluginLoadError: naming the provider and the cause.
        """
        return load_target(target, _owner(spec))

    def target(self, spec: HookSpec) -> Any:
        """Import the object that a spec describes.

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
        """Add a hook for this process. See :func:`commhooks.register`.

        Raises:
            AmbiguousHookError: a hook of this kind has the name, or one of the aliases, already.
            HookConfigError: `spec` is not a HookSpec.
        """
        if not isinstance(spec, HookSpec):
            raise HookConfigError(
                f"register takes a HookSpec, got {spec!r}. Write register(HookSpec('mine', 'reduction', 'module:Mine', "
                "'summary'), Mine)"
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
        """Remove a hook that `register` added.

        Raises:
            UnknownHookError: `register` added no hook of that name in this process.
        """
        with self._lock:
            keys = [key for key in self._local if key[1] == name and kind in (None, key[0])]
            if not keys:
                names = ", ".join(sorted({key[1] for key in self._local})) or "none"
                raise UnknownHookError(f"{name!r} was not registered in this process; registered: {names}")
            for key in keys:
                self._local.pop(key)
                self._objects.pop(key, None)

    # -- expressions

    def levels(
        self, expression: str | Mapping[str, Any], kind: str | None = None, *, declared_only: bool = False
    ) -> list[tuple[HookSpec, dict[str, Any]]]:
        """Return the spec and the given options of each level of an expression, outermost first, all checked.

        Args:
            expression: of a hook.
            kind: of its outermost level.
            declared_only: True to import no hook. Options are then checked only if the spec declares them.

        Raises:
            UnknownHookError, AmbiguousHookError, HookConfigError: as :func:`commhooks.create`.
        """
        found = []
        for node in nodes(canonical(expression)):
            spec = self.spec_of(node, kind)
            self.options_of(spec, node["config"], declared_only=declared_only)
            found.append((spec, dict(node["config"])))
        return found

    def refuse_outer(self, levels: list[tuple[HookSpec, dict[str, Any]]]) -> None:
        """Refuse an outer optimizer where a hook is expected.

        Raises:
            HookConfigError: naming it.
        """
        for spec, _ in levels:
            if spec.kind == "outer":
                raise HookConfigError(
                    f"{spec.name!r} is an outer optimizer, not a hook. Use commhooks run --outer {spec.example!r}, or "
                    f"{spec.target.replace(':', '.')}(optimizer, model) in the script"
                )

    def outer(
        self, expression: str | Mapping[str, Any], *, declared_only: bool = False
    ) -> tuple[HookSpec, dict[str, Any]]:
        """Return the spec and the options of an outer optimizer, checked and completed with the defaults.

        Args:
            expression: of an outer optimizer.
            declared_only: True to import no target, as in :meth:`levels`.

        Raises:
            UnknownHookError, AmbiguousHookError: no or several outer optimizers have the name.
            HookConfigError: a bad option, or the expression names a hook.
        """
        node = canonical(expression)
        spec = self.spec_of(node)
        if spec.kind != "outer" or "inner" in node or "rules" in node:
            names = ", ".join(one.name for one in self.list_hooks(kind="outer")) or f"none: {NOT_INSTALLED}"
            raise HookConfigError(
                f"{spec.name!r} is a {spec.kind}, not an outer optimizer. Outer optimizers: {names}. Give a hook as their "
                f"exchange, e.g. diloco(exchange={spec.name})"
            )
        return spec, self.options_of(spec, node["config"], declared_only=declared_only)

    def spec_of(self, node: Node, kind: str | None = None) -> HookSpec:
        """Return the spec of a node's own level.

        A name that several kinds share is a wrapper if it has a hook inside, and of the given kind otherwise.
        """
        provider = node.get("provider")
        inside = "inner" in node or "rules" in node
        if inside and self.list_hooks(node["hook"], kind="wrapper", provider=provider):
            kind = "wrapper"
        return self.resolve(node["hook"], kind=kind, provider=provider)

    def options_of(self, spec: HookSpec, given: Mapping[str, Any], *, declared_only: bool = False) -> dict[str, Any]:
        """Return the options of one level, checked and completed with the defaults.

        With `declared_only`, options of a target without declared ones are returned as given, and nothing is imported.

        Raises:
            HookConfigError: naming option, value, legal values, and the closest name.
        """
        if spec.options is None and declared_only:
            return dict(given)
        if spec.options is None:
            return self._options_of_signature(spec, given)
        _refuse_unknown_options(spec, given, list(spec.options))
        config = {name: option.default for name, option in spec.options.items()}
        for name, value in given.items():
            option = spec.options[name]
            try:
                config[name] = option.check(value)
            except ValueError:
                raise HookConfigError(
                    f"{spec.name}({name}={value!r}): {name} must be {option.accepts()} ({option.doc})"
                ) from None
            if option.hook:
                expression: Any = config[name]  # a hook's option holds an expression after the check
                self.refuse_outer(self.levels(expression, declared_only=declared_only))
        return config

    def _options_of_signature(self, spec: HookSpec, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options of a hook without a spec: keyword parameters of its target, or of a foreign hook's state."""
        foreign = spec.kind in ("ddp", "fsdp")
        if foreign and spec.state is None:
            return dict(given)
        target = self.load(spec.state, spec) if foreign and spec.state else self.target(spec)
        try:
            parameters = list(inspect.signature(target).parameters.values())
        except (TypeError, ValueError):  # some builtins and extension types have no signature
            return dict(given)
        leading = 1 if foreign or spec.kind == "wrapper" else 2 if inspect.isgeneratorfunction(target) else 0
        options = [p for p in parameters[leading:] if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            _refuse_unknown_options(spec, given, [p.name for p in options])
        missing = [p.name for p in options if p.default is p.empty and p.name not in given]
        if missing:
            raise HookConfigError(f"{spec.name} needs the option {missing[0]!r}: write {spec.name}({missing[0]}=...)")
        plain = {p.name: p.default for p in options if type(p.default) in (int, float, bool, str, type(None))}
        return {**plain, **given}

    # -- commands and adapters

    def commands(self) -> list[Command]:
        """Return the subcommands that packages add, ordered by name, then provider. Imports none."""
        return sorted(self.snapshot().commands, key=lambda command: (command.name, command.provider))

    def command(self, asked: str) -> SetUp:
        """Import the function of a subcommand.

        Args:
            asked: its name, or `provider/name`.

        Raises:
            UnknownHookError: no package has the command.
            AmbiguousHookError: several packages have it.
            PluginLoadError: naming the provider and the cause.
        """
        found = [command for command in self.commands() if asked in (command.name, command.id)]
        if not found:
            if package := package_of(COMMANDS, asked):
                raise UnknownHookError(f"the command {asked!r} comes with {package}, {NOT_INSTALLED}")
            names = [*OWN_COMMANDS, *sorted({command.name for command in self.commands()})]
            close = difflib.get_close_matches(asked, [*names, *all_names(COMMANDS)], 1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise UnknownHookError(f"unknown command {asked!r}{hint}\n  installed: {', '.join(names)}")
        if len(found) > 1:
            both = ", ".join(f"{command.id} {command.version}" for command in found)
            raise AmbiguousHookError(
                f"the command {asked!r} is ambiguous: {both}\n  name the provider: commhooks {found[0].id}, or "
                "remove one of the packages"
            )
        owner = f"{found[0].provider} {found[0].version} (command {found[0].name!r})"
        set_up: SetUp = load_target(found[0].target, owner)
        if not callable(set_up):
            raise PluginLoadError(f"{owner}: {found[0].target!r} is a {type(set_up).__name__}, not callable")
        return set_up

    def adapters(self) -> dict[str, str]:
        """Return the adapter (`"module:attribute"`) of each class that a plugin serves, by the class's full name.

        Raises:
            AmbiguousHookError: two plugins serve one class.
        """
        found: dict[str, str] = {}
        for _, pairs in self.ask("commhooks_adapter"):
            for cls, target in pairs:
                if found.setdefault(cls, target) != target:
                    raise AmbiguousHookError(f"two adapters claim {cls}: {found[cls]} and {target}; remove one plugin")
        return found

    def local_gradients(self) -> dict[str, str]:
        """Return the `"module:attribute"` that stops the averaging of gradients, by the model class's full name."""
        return {cls: target for _, pairs in self.ask("commhooks_local_gradients") for cls, target in pairs}

    def wraps(self) -> list[str]:
        """Return the names of the classes and functions that wrap a model for data parallelism, for messages."""
        return sorted({one.partition(":")[2] for _, targets in self.ask("commhooks_wraps") for one in targets})

    def adapter_of(self, names: list[str], subject: str) -> Any:
        """Import the adapter of the first class that has one; return None if no class has.

        Args:
            names: full names of a class and its bases, see :func:`class_names`.
            subject: of the error: "support for ...".

        Raises:
            AttachError: the package of this project that has the adapter is not installed.
            AmbiguousHookError: two plugins serve one class.
        """
        adapters = self.adapters()
        for name in names:
            if name in adapters:
                return load_target(adapters[name])
        for name in names:
            if package := package_of(ADAPTERS, name):
                raise AttachError(f"{subject} comes with {package}, {NOT_INSTALLED}")
        return None


def class_names(served: object) -> list[str]:
    """Return the full names of an object's class and its bases, in method resolution order."""
    return [f"{cls.__module__}.{cls.__qualname__}" for cls in type(served).__mro__]


def _wrapped(label: str, names: list[str]) -> str:
    """Return a list of names in lines of at most 78 columns, for a message that indents by two."""
    return textwrap.fill(
        f"{label}: {', '.join(names)}", 78, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
    )


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


def _refuse_unknown_options(spec: HookSpec, given: Mapping[str, Any], legal: list[str]) -> None:
    for name in given:
        if name not in legal:
            close = difflib.get_close_matches(name, legal, 1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            takes = f"it takes {', '.join(legal)}" if legal else "it takes none"
            raise HookConfigError(f"{spec.name} has no option {name!r} (given {name}={given[name]!r}); {takes}{hint}")


REGISTRY = Registry()
