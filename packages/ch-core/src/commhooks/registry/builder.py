"""From a canonical node to the object it describes: resolve, check the options, call the targets inside out.

The result is a `Built`: the object for the engine or for DDP, the node as it was given (aliases resolved),
and the same node with every default filled in, which is what the ranks compare.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from commhooks.errors import HookConfigError, HookNotSupportedError
from commhooks.registry.expression import Node, canonical, unparse
from commhooks.registry.hook_function import as_hook
from commhooks.registry.registry import REGISTRY, Registry, warn_if_deprecated
from commhooks.registry.specs import HookSpec


@dataclass(frozen=True, slots=True)
class Built:
    """A configured hook.

    Attributes:
        value: a Reduction, or a foreign callable (`kind` tells).
        kind: `"reduction"`, `"ddp"` or `"fsdp"`.
        node: the canonical node, aliases resolved, options as given.
        full: the same node with every option but local ones, and the provider and version of each level.
        make_state: for a foreign hook with a state class: called with the process group, gives the state.
    """

    value: Any
    kind: str
    node: Node
    full: Node
    make_state: Callable[..., Any] | None = None

    @property
    def expr(self) -> str:
        """The expression that builds this again."""
        return unparse(self.node)


class Builder:
    """Builds nodes against one registry."""

    def __init__(self, registry: Registry = REGISTRY) -> None:
        self.registry = registry

    def spec(self, node: Node, kind: str | None = None) -> HookSpec:
        """The spec of a node's own level."""
        return self.registry.resolve(node["hook"], kind=kind, provider=node.get("provider"))

    def get(self, name: str, kind: str | None = None) -> Callable[..., Any]:
        """The plain callable behind a name, with PyTorch's signature.

        A DDP hook `(state, bucket) -> Future`, a wrapper `hook -> hook`, or with `kind="fsdp"` FSDP1's
        `(state, grad[, output]) -> None`. For a configured hook use `commhooks.create` or `commhooks.attach`.

        Raises:
            UnknownHookError, AmbiguousHookError: see `resolve`.
            PluginLoadError: the provider's code failed to import.
            HookNotSupportedError: `kind="fsdp2"`; FSDP2 takes no hook function.
            HookConfigError: `name` is an expression, or `kind` is unknown.
        """
        if kind == "fsdp2":
            raise HookNotSupportedError(
                f"FSDP2 has no hook function to return for {name!r}: use commhooks.attach(model, {name!r})"
            )
        if "(" in name:
            raise HookConfigError(
                f"get takes a name, not an expression: {name!r}; use commhooks.create or commhooks.attach"
            )
        spec = self.registry.resolve(name, kind=kind)
        warn_if_deprecated(spec)
        if spec.kind == "reduction" and spec.hook is None:
            node = {"hook": spec.name, "provider": spec.provider, "config": {}}
            return as_hook(self.build(node, kind="reduction").value)
        if spec.hook is not None:
            return self.registry.load(spec.hook, spec)  # type: ignore[no-any-return]
        return self.registry.target(spec)  # type: ignore[no-any-return]

    def build(self, node: Node, *, kind: str | None = None) -> Built:
        """The object that a canonical node describes.

        Args:
            node: from `commhooks.registry.expression.canonical`.
            kind: `"fsdp"` for an FSDP1 hook; it applies to the innermost level.

        Raises:
            UnknownHookError, AmbiguousHookError, PluginLoadError: a level cannot be found or imported.
            HookConfigError: an option is unknown or out of range, a wrapper lacks or refuses its inner hook,
                or a hook that is no wrapper has one.
        """
        inside = "inner" in node or "rules" in node
        spec = self.spec(node, "wrapper" if inside and self._has_wrapper(node) else kind)
        warn_if_deprecated(spec)
        if inside and spec.kind != "wrapper":
            raise HookConfigError(
                f"{spec.name!r} is a {spec.kind}, not a wrapper: it takes no inner hook, only options"
            )
        if spec.kind == "wrapper" and not inside:
            raise HookConfigError(f"{spec.name!r} is a wrapper and needs an inner hook, for example {spec.example}")
        base = {"hook": spec.name, **({"provider": spec.provider} if "provider" in node else {})}
        config = self.config(spec, node["config"])
        told = {name: value for name, value in config.items() if not _local(spec, name)}
        full = {"hook": spec.name, "provider": spec.provider, "version": spec.version, "config": told}
        if not inside:
            return self._leaf(spec, {**base, "config": node["config"]}, full, config)
        return self._wrapper(spec, node, base, full, config, kind)

    def _has_wrapper(self, node: Node) -> bool:
        """Prefer the wrapper of a name that several kinds share, but let `resolve` word the other errors."""
        return bool(self.registry.list_hooks(node["hook"], kind="wrapper", provider=node.get("provider")))

    def _leaf(self, spec: HookSpec, node: Node, full: Node, config: Mapping[str, Any]) -> Built:
        target = self.registry.target(spec)
        if spec.kind == "reduction":
            from commhooks.registry.function import as_reduction  # imports torch

            value = _call(spec, functools.partial(as_reduction, target), (), config)
            return Built(value, spec.kind, node, full)
        if spec.state is None:
            if config:
                raise HookConfigError(f"{spec.id} takes no options (it has no state), got {_shown(config)}")
            return Built(target, spec.kind, node, full)
        state = self.registry.load(spec.state, spec)
        return Built(target, spec.kind, node, full, functools.partial(_make_state, spec, state, dict(config)))

    def _wrapper(
        self, spec: HookSpec, node: Node, base: Node, full: Node, config: Mapping[str, Any], kind: str | None
    ) -> Built:
        if "rules" in node:
            rules = [(pattern, self.build(rule, kind=kind)) for pattern, rule in node["rules"]]
            parts = [built for _, built in rules]
            positional: tuple[Any, ...] = ([(pattern, built.value) for pattern, built in rules],)
            given: Node = {"rules": [[pattern, built.node] for pattern, built in rules]}
            every: Node = {"rules": [[pattern, built.full] for pattern, built in rules]}
        else:
            several = isinstance(node["inner"], list)
            parts = [self.build(each, kind=kind) for each in (node["inner"] if several else [node["inner"]])]
            positional = tuple(built.value for built in parts)
            given = {"inner": [built.node for built in parts] if several else parts[0].node}
            every = {"inner": [built.full for built in parts] if several else parts[0].full}
        kinds = {built.kind for built in parts}
        if "fsdp" in kinds:
            inner = next(built for built in parts if built.kind == "fsdp")
            raise HookConfigError(
                f"{spec.name!r} cannot wrap {inner.expr!r}: it is an FSDP1 hook, which takes no bucket"
            )
        states = [built.make_state for built in parts if built.make_state is not None]
        if len(states) > 1 or (states and len(parts) > 1):
            raise HookConfigError(f"{spec.name!r} can hold the state of one foreign hook, not beside other hooks")
        value = _call(spec, self.registry.target(spec), positional, config)
        outer = {**base, "config": node["config"], **given}
        from commhooks.reduction import Reduction  # imports torch

        made = "reduction" if isinstance(value, Reduction) else "ddp"
        return Built(value, made, outer, {**full, **every}, states[0] if states else None)

    def config(self, spec: HookSpec, given: Mapping[str, Any]) -> dict[str, Any]:
        """The options of one level, checked and with defaults filled in.

        Raises:
            HookConfigError: naming option, value, what is accepted, and the close match.
        """
        if spec.params is None:
            return self._from_signature(spec, given)
        _known_options(spec, given, list(spec.params))
        config = {name: param.default for name, param in spec.params.items()}
        for name, value in given.items():
            try:
                config[name] = spec.params[name].check(value)
            except ValueError:
                raise HookConfigError(
                    f"{spec.name}({name}={value!r}): {name} must be {spec.params[name].accepts()} "
                    f"({spec.params[name].doc})"
                ) from None
        return config

    def _from_signature(self, spec: HookSpec, given: Mapping[str, Any]) -> dict[str, Any]:
        """Options of a one-line entry: the keyword parameters of its target, or of a foreign hook's state."""
        foreign = spec.kind in ("ddp", "fsdp")
        if foreign and spec.state is None:
            return dict(given)
        target = self.registry.load(spec.state, spec) if foreign and spec.state else self.registry.target(spec)
        try:
            parameters = list(inspect.signature(target).parameters.values())
        except (TypeError, ValueError):  # some builtins and extension types have no signature
            return dict(given)
        leading = 1 if foreign or spec.kind == "wrapper" else 2 if inspect.isgeneratorfunction(target) else 0
        options = [p for p in parameters[leading:] if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            _known_options(spec, given, [p.name for p in options])
        missing = [p.name for p in options if p.default is p.empty and p.name not in given]
        if missing:
            raise HookConfigError(f"{spec.name} needs the option {missing[0]!r}: write {spec.name}({missing[0]}=...)")
        defaults = {p.name: p.default for p in options if p.default is not p.empty}
        return {**{k: v for k, v in defaults.items() if _plain(v)}, **given}


def _known_options(spec: HookSpec, given: Mapping[str, Any], legal: list[str]) -> None:
    for name in given:
        if name not in legal:
            close = get_close_matches(name, legal, 1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            takes = f"it takes {', '.join(legal)}" if legal else "it takes none"
            raise HookConfigError(f"{spec.name} has no option {name!r} (given {name}={given[name]!r}); {takes}{hint}")


def _local(spec: HookSpec, name: str) -> bool:
    return spec.params is not None and name in spec.params and spec.params[name].local


def _plain(value: object) -> bool:
    return value is None or type(value) in (int, float, bool, str)


def _shown(config: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in config.items())


def _call(spec: HookSpec, target: Any, positional: tuple[Any, ...], config: Mapping[str, Any]) -> Any:
    """Call a provider's factory; a value it refuses is a configuration error, the rest its own bug."""
    try:
        return target(*positional, **config)
    except HookConfigError:
        raise
    except (TypeError, ValueError) as error:
        what = f"{spec.id} refuses {_shown(config) or 'its configuration'}"
        raise HookConfigError(f"{what}{' or its inner hook' if positional else ''}: {error}") from error


def _make_state(spec: HookSpec, state: Any, config: Mapping[str, Any], process_group: object = None) -> Any:
    return _call(spec, state, (process_group,), config)


def build(what: str | Mapping[str, Any], *, kind: str | None = None) -> Built:
    """Build an expression, dict or node against the installed hooks. See `Builder.build`."""
    return Builder().build(canonical(what), kind=kind)
