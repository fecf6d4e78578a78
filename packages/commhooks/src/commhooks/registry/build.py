"""Builds hooks from expressions: find the spec of each level, check the options, call the targets from the inside out.

Imports torch. :mod:`~commhooks.registry.registry` answers everything that needs no hook object.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from ch_core import Bucket, HookConfigError, HookNotSupportedError, Reduction, Stages, StepContext
from commhooks.registry.discovery import load_target
from commhooks.registry.distributions import NOT_INSTALLED
from commhooks.registry.expression import Node, canonical, unparse
from commhooks.registry.registry import REGISTRY, Registry
from commhooks.registry.spec import HookSpec

if TYPE_CHECKING:
    from torch import Tensor
    from torch.futures import Future

    from ch_core import GradBucket


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Built:
    """A hook object and the expression that built it.

    Attributes:
        value: a Reduction, or a foreign function (see `kind`).
        kind: `"reduction"`, `"ddp"` or `"fsdp"`.
        node: canonical node with the options as given and aliases resolved.
        full: the same node with every option but local ones, and provider and version of each level. Ranks compare it.
        make_state: for a foreign hook with a state class. Takes the process group and returns the state.
    """

    value: Any
    kind: str
    node: Node
    full: Node
    make_state: Callable[..., object] | None = None

    @property
    def expr(self) -> str:
        """The expression that builds this again."""
        return unparse(self.node)


def build(hook: str | Mapping[str, Any], *, kind: str | None = None, registry: Registry = REGISTRY) -> Built:
    """Build the object that an expression describes.

    Args:
        hook: an expression, or its dict form.
        kind: `"fsdp"` for an FSDP1 hook; it applies to the innermost level.
        registry: finds the specs.

    Raises:
        UnknownHookError, AmbiguousHookError, PluginLoadError: a level cannot be found or imported.
        HookConfigError: an option is unknown or out of range, a wrapper lacks or refuses its inner hook, or a hook that
            is not a wrapper has one.
    """
    return _built(canonical(hook), kind, registry)


def _built(node: Node, kind: str | None, registry: Registry) -> Built:
    inside = "inner" in node or "rules" in node
    spec = registry.spec_of(node, kind)
    registry.refuse_outer([(spec, {})])
    if inside and spec.kind != "wrapper":
        raise HookConfigError(f"{spec.name!r} is a {spec.kind}, not a wrapper: it takes no inner hook, only options")
    if spec.kind == "wrapper" and not inside:
        raise HookConfigError(f"{spec.name!r} is a wrapper and needs an inner hook, for example {spec.example}")
    config = registry.options_of(spec, node["config"])
    compared = {k: v for k, v in config.items() if not (spec.options and k in spec.options and spec.options[k].local)}
    given: Node = {"hook": spec.name, **({"provider": spec.provider} if "provider" in node else {})}
    given["config"] = node["config"]
    full: Node = {"hook": spec.name, "provider": spec.provider, "version": spec.version, "config": compared}
    if inside:
        return _wrapper(spec, node, given, full, config, kind, registry)
    target = registry.target(spec)
    if spec.kind == "reduction":
        return Built(_call(spec, functools.partial(as_reduction, target), (), config), spec.kind, given, full)
    if spec.state is None:
        if config:
            raise HookConfigError(f"{spec.id} takes no options (it has no state), got {_listed(config)}")
        return Built(target, spec.kind, given, full)
    state = registry.load(spec.state, spec)
    return Built(target, spec.kind, given, full, functools.partial(_make_state, spec, state, dict(config)))


def _wrapper(
    spec: HookSpec,
    node: Node,
    given: Node,
    full: Node,
    config: Mapping[str, Any],
    kind: str | None,
    registry: Registry,
) -> Built:
    if "rules" in node:
        patterns = [pattern for pattern, _ in node["rules"]]
        parts = [_built(rule, kind, registry) for _, rule in node["rules"]]
        positional: tuple[Any, ...] = ([(p, built.value) for p, built in zip(patterns, parts, strict=True)],)
        given["rules"] = [[p, built.node] for p, built in zip(patterns, parts, strict=True)]
        full["rules"] = [[p, built.full] for p, built in zip(patterns, parts, strict=True)]
    else:
        several = isinstance(node["inner"], list)
        parts = [_built(each, kind, registry) for each in (node["inner"] if several else [node["inner"]])]
        positional = tuple(built.value for built in parts)
        given["inner"] = [built.node for built in parts] if several else parts[0].node
        full["inner"] = [built.full for built in parts] if several else parts[0].full
    for built in parts:
        if built.kind == "fsdp":
            raise HookConfigError(
                f"{spec.name!r} cannot wrap {built.expr!r}: it is an FSDP1 hook, which takes no bucket"
            )
    states = [built.make_state for built in parts if built.make_state is not None]
    if states and len(parts) > 1:
        raise HookConfigError(f"{spec.name!r} can wrap one foreign hook with a state alone, not together with others")
    value = _call(spec, registry.target(spec), positional, config)
    made = "reduction" if isinstance(value, Reduction) else "ddp"
    return Built(value, made, given, full, states[0] if states else None)


def _listed(config: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in config.items())


def _call(spec: HookSpec, target: Callable[..., T], positional: tuple[object, ...], config: Mapping[str, Any]) -> T:
    """Call a provider's factory. A refused value is a configuration error. Other errors are bugs of the factory."""
    try:
        return target(*positional, **config)
    except HookConfigError:
        raise
    except (TypeError, ValueError) as error:
        refused = f"{spec.id} refuses {_listed(config) or 'its configuration'}"
        raise HookConfigError(f"{refused}{' or its inner hook' if positional else ''}: {error}") from error


def _make_state(
    spec: HookSpec, state: Callable[..., object], config: Mapping[str, Any], process_group: object = None
) -> object:
    return _call(spec, state, (process_group,), config)


class FunctionReduction(Reduction):
    """A generator function `f(bucket, ctx, **options)` as a reduction without state."""

    lossy = True

    def __init__(self, function: Callable[..., Stages], /, **config: Any) -> None:
        self.function = function
        self.name = function.__name__
        self._config = config

    def run(self, bucket: Bucket, ctx: StepContext) -> Stages:
        return self.function(bucket, ctx, **self._config)

    def config(self) -> dict[str, Any]:
        return dict(self._config)


def as_reduction(target: object, /, **config: Any) -> Reduction:
    """Return a :class:`~commhooks.Reduction` from a reduction, a class or factory of one, or a generator function.

    Raises:
        HookConfigError: `target` is none of these, or does not take `config`.
    """
    if isinstance(target, Reduction):
        if config:
            raise HookConfigError(f"{target!r} is configured already; it takes no further {sorted(config)}")
        return target
    if isinstance(target, functools.partial) and not target.args:
        return as_reduction(target.func, **{**target.keywords, **config})
    if inspect.isgeneratorfunction(target):
        return FunctionReduction(target, **config)
    if inspect.isfunction(target) and [*inspect.signature(target).parameters][:2] == ["bucket", "ctx"]:
        raise HookConfigError(
            f"{target.__name__}(bucket, ctx) has no yield, and must be a generator function. It yields its requests, such "
            "as AllReduce(bucket.buffer), and continues when they hold the result"
        )
    made = target(**config) if callable(target) else target
    if not isinstance(made, Reduction):
        raise HookConfigError(
            f"{target!r} is not a reduction: expected a generator function (bucket, ctx), a Reduction, or a function "
            f"that returns one; got {type(made).__name__}"
        )
    return made


GRAD_BUCKET = "torch.distributed.GradBucket"
"""Class under which a plugin offers functions with PyTorch's signature. commhooks knows no wrapped model; ch-ddp does."""


def as_hook(reduction: Any, name: str | None = None) -> "Callable[[Any, GradBucket], Future[Tensor]]":
    """Return a reduction as a function `(state, bucket) -> Future` with PyTorch's signature.

    Args:
        reduction: runs on every bucket. A function that makes a reduction from the hook's state is accepted, too.
        name: shown by torch and frameworks; by default the reduction's own.

    Raises:
        HookNotSupportedError: ch-ddp, which makes such functions, is not installed.

    Example:
        >>> from commhooks import Plain
        >>> as_hook(Plain(), "my_hook")
        <hook my_hook>
    """
    target = REGISTRY.adapters().get(GRAD_BUCKET)
    if target is None:
        raise HookNotSupportedError(
            f"ch-ddp makes (state, bucket) functions, also of {getattr(reduction, 'name', reduction)!r:.80}, and is "
            + NOT_INSTALLED
        )
    hook: Callable[[Any, GradBucket], Future[Tensor]] = load_target(target)(reduction, name)
    return hook
