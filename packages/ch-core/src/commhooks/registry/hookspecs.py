"""The questions that several plugins may answer at once, as pluggy hook specifications.

A plugin is a light module (no torch) named in the entry-point group `commhooks`, with functions marked
`@hookimpl`. pluggy lets an implementation ask for fewer arguments than listed here, so arguments can be added
without breaking anyone; a misspelt hook name is refused by the loader.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import pluggy

from commhooks.registry.specs import HookSpec

PROJECT = "commhooks"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)
"""Marks a function of a plugin module as the answer to one of the questions below, which it is called like."""


@hookspec
def commhooks_specs() -> Iterable[HookSpec]:  # type: ignore[empty-body]
    """The hooks this plugin provides. Pure: called at every refresh, must not import torch."""


@hookspec
def commhooks_check(  # type: ignore[empty-body]
    spec: HookSpec, config: Mapping[str, Any], context: Mapping[str, Any]
) -> Iterable[str]:
    """Reasons why `spec` with `config` cannot run in `context`, one sentence each; nothing if it can.

    `context` has the keys the caller knew: `backend`, `device`, `dtype` (strings), `world_size` (int),
    `adapter` (the model class's qualified name).
    """


@hookspec
def commhooks_adapter() -> Iterable[tuple[str, str]]:  # type: ignore[empty-body]
    """Pairs of a model class's fully qualified name and the `"module:attr"` of the adapter that serves it."""


@hookspec
def commhooks_manager() -> Iterable[tuple[str, str]]:  # type: ignore[empty-body]
    """Pairs of a manager class's fully qualified name and the `"module:attr"` of what reduces between its groups: a
    `commhooks.adapters.ManagerAdapter`, for `attach(model, hook, manager=...)`.
    """


@hookspec
def commhooks_wraps() -> Iterable[str]:  # type: ignore[empty-body]
    """What `commhooks run` should look for: `"module:name"` of a class whose instance is a wrapped model, or of a function
    that returns one (or a list). The module is not imported for this.
    """


@hookspec
def commhooks_hook_function() -> str:  # type: ignore[empty-body]
    """The `"module:attr"` of what makes a `(state, bucket)` function of a reduction: `as_hook(reduction, name)`."""


@hookspec
def commhooks_env() -> Mapping[str, str]:  # type: ignore[empty-body]
    """Lines to add to `python -m commhooks env`, by label."""
