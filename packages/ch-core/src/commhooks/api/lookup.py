"""The public functions over the process's registry: `get`, `spec`, `list_hooks`, `describe` and friends."""

from collections.abc import Callable
from typing import Any

from commhooks.registry.builder import Builder
from commhooks.registry.registry import REGISTRY
from commhooks.registry.specs import HookSpec, PluginFailure


def get(name: str, kind: str | None = None) -> Callable[..., Any]:
    """The plain callable behind a name, with PyTorch's signature, ready for `register_comm_hook`.

    Args:
        name: a hook's name, alias, or `provider/name`.
        kind: `"reduction"`, `"ddp"`, `"wrapper"`, or `"fsdp"` for FSDP1's variant of a name; by default what
            DDP takes.

    Raises:
        UnknownHookError: with the close match, the package to install, and plugins that failed to load.
        AmbiguousHookError: several providers or kinds; names them.
        PluginLoadError: the provider's code failed to import.
        HookNotSupportedError: `kind="fsdp2"`, which has no hook function.

    Example:
        >>> get("no_such_hook_at_all")
        Traceback (most recent call last):
        ...
        commhooks.errors.UnknownHookError: unknown hook 'no_such_hook_at_all'...
    """
    return Builder().get(name, kind)


def spec(name: str, kind: str | None = None) -> HookSpec:
    """The description of a hook, without importing it.

    Raises:
        UnknownHookError, AmbiguousHookError: as `get`.
    """
    return REGISTRY.resolve(name, kind=kind)


def list_hooks(pattern: str = "*", *, kind: str | None = None, provider: str | None = None) -> list[HookSpec]:
    """The installed hooks whose name or alias matches a shell pattern, ordered by kind, name and provider.

    Imports no hook and no torch.

    Example:
        >>> list_hooks("no_such_*")
        []
    """
    return REGISTRY.list_hooks(pattern, kind=kind, provider=provider)


def describe(name: str, kind: str | None = None) -> str:
    """A text block on one hook: what it does, its options with what they accept, needs, provider, example.

    Args:
        name: a name, or an expression: then a block for each of its levels, with the options that are set.
        kind: of the innermost level.

    Raises:
        UnknownHookError, AmbiguousHookError: as `get`.
        HookConfigError: an expression is malformed, or sets an option that is unknown or out of range.
    """
    from commhooks.registry.description import expression_text

    return expression_text(name, kind)


def failures() -> list[PluginFailure]:
    """Plugins that could not be used, each with the phase, the cause and the traceback."""
    return REGISTRY.failures()


def register(spec: HookSpec, target: Callable[..., Any] | None = None, *, overwrite: bool = False) -> None:
    """Add a hook for this process, for notebooks and tests; packages use entry points.

    Args:
        spec: what it is; its provider becomes `"local"`.
        target: the object itself; by default `spec.target` is imported when asked for.
        overwrite: replace an earlier `register` of the same kind and name.

    Raises:
        AmbiguousHookError: the kind and name exist already.
        HookConfigError: ``spec`` is not a HookSpec.

    Example:
        >>> register(HookSpec("mine", "ddp", "math:fsum", "an example"))
        >>> get("mine").__name__
        'fsum'
        >>> unregister("mine")
    """
    REGISTRY.register(spec, target, overwrite=overwrite)


def unregister(name: str, kind: str | None = None) -> None:
    """Remove what `register` added.

    Raises:
        UnknownHookError: nothing of that name was registered in this process.
    """
    REGISTRY.unregister(name, kind)


def refresh() -> None:
    """Scan the installed distributions again at the next lookup, e.g. after `pip install` in a notebook."""
    REGISTRY.refresh()
