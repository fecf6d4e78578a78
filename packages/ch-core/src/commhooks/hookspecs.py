"""The questions that several plugins may answer at once, as pluggy hook specifications.

A plugin is a light module (no torch) named in the entry-point group `commhooks`, with functions marked
`@hookimpl`. pluggy lets an implementation ask for fewer arguments than listed here, so arguments can be added
without breaking anyone; a misspelt hook name is refused by the loader.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import pluggy

from commhooks.specs import HookSpec

PROJECT = "commhooks"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


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
def commhooks_env() -> Mapping[str, str]:  # type: ignore[empty-body]
    """Lines to add to `python -m commhooks env`, by label."""
