"""The public functions over the installed hooks: find, describe, check and register them.

Imports no torch, except in `get`, and in `describe` of a hook that declares no options.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from ch_core import CommHooksError, HookConfigError, HookNotSupportedError, PluginLoadError
from commhooks.registry.expression import canonical, nodes, parse, unparse
from commhooks.registry.registry import REGISTRY, Registry
from commhooks.registry.spec import CAPABILITIES, HookSpec, PluginFailure


def get(name: str, kind: str | None = None, *, registry: Registry = REGISTRY) -> Callable[..., Any]:
    """Return the plain function of a hook, with PyTorch's signature, for `register_comm_hook`.

    This is a DDP hook `(state, bucket) -> Future`, a wrapper `hook -> hook`, or with `kind="fsdp"` FSDP1's
    `(state, grad[, output]) -> None`. :func:`commhooks.create` and :func:`commhooks.attach` take options.

    Args:
        name: a hook's name or alias, or `provider/name`.
        kind: `"reduction"`, `"ddp"`, `"wrapper"` or `"fsdp"`; by default a hook for DDP. With `"outer"` the result makes an
            outer optimizer.
        registry: finds the name.

    Raises:
        UnknownHookError: with the closest name, the package to install, and the plugins that failed to load.
        AmbiguousHookError: several providers or kinds have the name.
        PluginLoadError: the provider's code failed to import.
        HookNotSupportedError: `kind="fsdp2"`, because FSDP2 takes no hook function.
        HookConfigError: `name` is an expression, or `kind` is unknown.

    Example:
        >>> get("no_such_hook_at_all")
        Traceback (most recent call last):
        ...
        ch_core.errors.UnknownHookError: unknown hook 'no_such_hook_at_all'...
    """
    if kind == "fsdp2":
        raise HookNotSupportedError(f"FSDP2 takes no hook function: use commhooks.attach(model, {name!r}) for {name!r}")
    if "(" in name:
        raise HookConfigError(
            f"get takes a name, not an expression: {name!r}; use commhooks.create or commhooks.attach"
        )
    spec = registry.resolve(name, kind=kind)
    if kind is None:
        registry.refuse_outer([(spec, {})])
    if spec.hook is not None:
        return registry.load(spec.hook, spec)  # type: ignore[no-any-return]
    if spec.kind != "reduction":
        return registry.target(spec)  # type: ignore[no-any-return]
    from commhooks.registry.build import as_hook, build  # imports torch

    return as_hook(build({"hook": spec.name, "provider": spec.provider}, kind="reduction", registry=registry).value)


def spec(name: str, kind: str | None = None) -> HookSpec:
    """Return the description of a hook, without importing the hook.

    Raises:
        UnknownHookError, AmbiguousHookError: as :func:`get`.

    Example:
        >>> register(HookSpec("mine", "ddp", "math:fsum", "an example"))
        >>> spec("mine").summary
        'an example'
        >>> unregister("mine")
    """
    return REGISTRY.resolve(name, kind=kind)


def list_hooks(pattern: str = "*", *, kind: str | None = None, provider: str | None = None) -> list[HookSpec]:
    """Return the installed hooks whose name or alias matches a shell pattern, ordered by kind, name and provider.

    Imports no hook and no torch.

    Example:
        >>> list_hooks("no_such_*")
        []
    """
    return REGISTRY.list_hooks(pattern, kind=kind, provider=provider)


def describe(name: str, kind: str | None = None) -> str:
    """Return a text on one hook: its use, cost, options, legal values, requirements, provider and example.

    Args:
        name: a name, or an expression. An expression gives one text for each level, with the options that it sets.
        kind: of the innermost level.

    Raises:
        UnknownHookError, AmbiguousHookError: as :func:`get`.
        HookConfigError: the expression is malformed, or an option is unknown or out of range.

    Example:
        >>> register(HookSpec("mine", "ddp", "math:fsum", "an example"))
        >>> describe("mine").splitlines()[0]
        'mine (ddp): an example'
        >>> unregister("mine")
    """
    levels = REGISTRY.levels(name, kind)
    if len(levels) == 1 and not levels[0][1]:
        return describe_spec(levels[0][0])
    return "\n\n".join([unparse(parse(name)), *(describe_spec(spec, given) for spec, given in levels)])


def describe_spec(spec: HookSpec, given: Mapping[str, Any] | None = None) -> str:
    """Return the text of one level, with the options that an expression gives in place of the defaults."""
    given = given or {}
    needs = {name: getattr(spec.needs, name) for name in ("backends", "devices", "dtypes", "torch", "packages")}
    facts = {
        "from": f"{spec.provider} {spec.version}",
        "example": spec.example,
        "when": spec.when,
        "loss": spec.loss,
        "caution": spec.caution,
        "aliases": ", ".join(spec.aliases),
        "effect": _in_words(spec.capabilities),
        "needs": "; ".join(f"{k} {v if isinstance(v, str) else ', '.join(v)}" for k, v in needs.items() if v),
        "callable": spec.hook or "",
        "state": spec.state or "",
        "paper": spec.paper,
        "docs": spec.docs,
    }
    docstring = _docstring(spec) if spec.options is None else ""
    lines = [f"{spec.name} ({spec.kind}): {spec.summary or docstring or '(no summary)'}"]
    if spec.summary:
        facts = {"docstring": docstring, **facts}
    lines += [f"  {label:<9} {value}" for label, value in facts.items() if value]
    if not spec.options:
        options = "none" if spec.options is not None else _signature(spec)
        return "\n".join([*lines, f"  options   {options}"])
    shown = {name: f"{name}={given.get(name, option.default)!r}" for name, option in spec.options.items()}
    width = max(map(len, shown.values()))
    lines += ["  options"]
    for name, option in spec.options.items():
        brings = f" (it then {_in_words(option.brings)})" if option.brings else ""
        default = f" (given; default {option.default!r})" if name in given else ""
        lines.append(f"    {shown[name]:<{width}}  {option.accepts()}: {option.doc}{brings}{default}")
    return "\n".join(lines)


def _docstring(spec: HookSpec) -> str:
    """Return :func:`docstring`, or an empty string if the target cannot be imported."""
    try:
        return docstring(spec)
    except CommHooksError:  # `list` and `doctor` show it
        return ""


def docstring(spec: HookSpec) -> str:
    """Return the first paragraph of the docstring of a hook's target in one line. Imports the target.

    Raises:
        PluginLoadError: the target cannot be imported, or its docstring is no text.
    """
    target = REGISTRY.target(spec)
    try:
        found = inspect.cleandoc(target.__doc__ or "")  # getdoc() would show a base class's docstring
    except Exception as error:
        raise PluginLoadError(f"{spec.id}: the docstring of {spec.target!r} cannot be read: {error!r}") from error
    return " ".join(found.partition("\n\n")[0].split())


def _signature(spec: HookSpec) -> str:
    """Return the options of a hook without declared ones, as its code has them."""
    try:
        options = REGISTRY.options_of(spec, {})
    except CommHooksError as error:  # it cannot be imported, or it needs an option
        return f"not known: {error}"
    return ", ".join(f"{name}={value!r}" for name, value in options.items()) or "none"


def _in_words(capabilities: frozenset[str]) -> str:
    return "; ".join(words for capability, words in CAPABILITIES.items() if capability in capabilities)


def why_not(
    hook: str | Mapping[str, Any],
    *,
    backend: str | None = None,
    device: str | None = None,
    dtype: str | None = None,
    registry: Registry = REGISTRY,
) -> list[str]:
    """Return every reason why a hook cannot be used, or `[]` if it can.

    Checks each level of the expression: unknown names and options, code that fails to import, and the hook's `Needs`.
    Omitted arguments are not checked.

    Args:
        hook: a name, an expression or a dict.
        backend: of the process group, e.g. `"gloo"`.
        device: type of the device, e.g. `"cuda"`.
        dtype: of the gradients, e.g. `"bfloat16"`.
        registry: finds the names.

    Raises:
        HookConfigError: `hook` is not an expression.
    """
    place = {"backend": backend, "device": device, "dtype": dtype}
    reasons: list[str] = []
    for node in nodes(canonical(hook)):
        try:
            spec = registry.spec_of(node)
            registry.options_of(spec, node["config"])
            for target in filter(None, (spec.hook, spec.state)):
                registry.load(target, spec)
            registry.target(spec)
        except (LookupError, ValueError, ImportError) as error:
            reasons.append(str(error))
        else:
            reasons += spec.needs.unmet(spec.name, place)
    return reasons


def failures() -> list[PluginFailure]:
    """Return the plugins that could not be used, each with phase, cause and traceback.

    Example:
        >>> for failure in failures():  # prints nothing if all plugins load
        ...     print(failure)
    """
    return REGISTRY.failures()


def register(spec: HookSpec, target: Callable[..., Any] | None = None, *, overwrite: bool = False) -> None:
    """Add a hook for this process, for notebooks and tests. Packages use entry points.

    Args:
        spec: its provider becomes `"local"`.
        target: the object itself. By default `spec.target` is imported when the hook is used.
        overwrite: True replaces an earlier `register` of the same kind and name.

    Raises:
        AmbiguousHookError: a hook of this kind has the name, or one of the aliases, already.
        HookConfigError: `spec` is not a HookSpec.

    Example:
        >>> register(HookSpec("mine", "ddp", "math:fsum", "an example"))
        >>> get("mine").__name__
        'fsum'
        >>> unregister("mine")
    """
    REGISTRY.register(spec, target, overwrite=overwrite)


def unregister(name: str, kind: str | None = None) -> None:
    """Remove a hook that :func:`register` added.

    Raises:
        UnknownHookError: :func:`register` added no hook of that name in this process.
    """
    REGISTRY.unregister(name, kind)


def refresh() -> None:
    """Scan the installed packages again at the next lookup, e.g. after `pip install` in a notebook."""
    REGISTRY.refresh()
