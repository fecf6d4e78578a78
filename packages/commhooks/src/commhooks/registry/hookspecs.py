"""The functions that a plugin module may provide, as pluggy hook specifications.

A plugin is a light module (no torch) named in the entry-point group `commhooks`. Its functions are marked `@hookimpl`.
Discovery refuses a misspelt function name.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import pluggy

from commhooks.registry.spec import TARGET, HookSpec

PROJECT = "commhooks"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)
"""Marks a function of a plugin module as the implementation of the specification with its name."""


@hookspec
def commhooks_specs() -> Iterable[HookSpec]:  # type: ignore[empty-body]
    """Return the hooks of this plugin. Called at every refresh; must not import torch."""


@hookspec
def commhooks_adapter() -> Iterable[tuple[str, str]]:  # type: ignore[empty-body]
    """Return pairs of a class's fully qualified name and the `"module:attribute"` of the function that serves it.

    - class of a wrapped model: the function `adapter(model, handle, options) -> Binding` for `attach(model, hook)`;
    - class of a manager: the :data:`~commhooks.ManagerAdapter` for `attach(model, hook, manager=...)`;
    - `"torch.distributed.GradBucket"`: `f(reduction, name)`, which returns a `(state, bucket)` function.
    """


@hookspec
def commhooks_wraps() -> Iterable[str]:  # type: ignore[empty-body]
    """Return the wrappers that `commhooks run` watches, each as `"module:name"`.

    A wrapper is a class whose instance is a wrapped model, or a function that returns one model or a list. Its module is
    not imported for this.
    """


@hookspec
def commhooks_local_gradients() -> Iterable[tuple[str, str]]:  # type: ignore[empty-body]
    """Return pairs of a wrapped model's class, by its fully qualified name, and a `"module:attribute"`.

    The attribute is a function `local_gradients(model)` for outer optimizers. From then on the model leaves each rank its own
    gradients, and starts no collective in a step. It returns the process group of the ranks that averaged before. It raises a
    SlotTakenError if the script has its own communication hook, and a HookNotSupportedError if the model cannot do it.
    """


@hookspec
def commhooks_env() -> Mapping[str, str]:  # type: ignore[empty-body]
    """Return lines for `commhooks env`, by label."""


_PAIRS = "pairs of a class's full name and 'module:attribute'"
LEGAL = {
    "commhooks_specs": "HookSpec objects",
    "commhooks_adapter": _PAIRS,
    "commhooks_wraps": "texts 'module:name'",
    "commhooks_local_gradients": _PAIRS,
    "commhooks_env": "a mapping of labels to texts",
}
"""What each function has to return, in words."""


def checked(function: str, answer: Any) -> Any:
    """Return a plugin's answer as a list or a dict. A generator runs here, so that its errors are those of its plugin.

    Raises:
        TypeError: the answer is not what the specification asks for.
    """
    if isinstance(answer, Mapping) and function == "commhooks_env":
        return {str(label): str(value) for label, value in answer.items()}
    rows = list(answer) if isinstance(answer, Iterable) and function != "commhooks_env" else [None]
    if not all(_legal(function, row) for row in rows):
        raise TypeError(f"{function}() returned {answer!r:.80}; it has to return {LEGAL[function]}")
    return rows


def _legal(function: str, row: object) -> bool:
    if function == "commhooks_specs":
        return isinstance(row, HookSpec)
    if function == "commhooks_wraps":
        return isinstance(row, str) and bool(TARGET.match(row))
    if not isinstance(row, tuple | list) or len(row) != 2:
        return False
    name, target = row
    return isinstance(name, str) and isinstance(target, str) and bool(TARGET.match(target))
