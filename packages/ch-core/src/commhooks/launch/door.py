"""Waits for torch and for the wrappers of models, without importing any of them.

``commhooks run`` opens the door in its own process. Where a launcher owns the command line, or the script starts processes
of its own, ``COMMHOOKS_HOOK`` opens it: ch-core installs ``commhooks-door.pth``, a line that the interpreter reads when it
starts. It does nothing, and imports nothing, unless the variable is set. Standard library only, up to the moment when torch
is there.
"""

import functools
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from commhooks.launch.settings import Settings

FIRST = "torch.nn.parallel.distributed"
"""Imported by ``import torch``, and the first module that can make a model which a hook fits."""


class AfterImport:
    """A finder that calls back when a module has been executed; it finds nothing itself."""

    def __init__(self) -> None:
        self.waiting: dict[str, list[Callable[[ModuleType], None]]] = {}
        self.executed: set[str] = set()  # by loaders of ours: their import has not ended when they call back

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: object = None) -> ModuleSpec | None:
        """The spec that the other finders give, its loader made to call back."""
        if name not in self.waiting:
            return None
        callbacks = self.waiting.pop(name)  # before the others are asked, or they would ask this one again
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        loader, run = spec.loader, spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            vars(loader).pop("exec_module", None)  # the loader is as it was, for whoever looks at it
            run(module)
            self.executed.add(name)
            for callback in callbacks:
                callback(module)

        loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec

    def when_imported(self, name: str, callback: Callable[[ModuleType], None]) -> None:
        """Call ``callback`` with the module: now if it is there, else when it has been imported."""
        module = sys.modules.get(name)
        begun = getattr(getattr(module, "__spec__", None), "_initializing", False)
        if module is not None and (name in self.executed or not begun):
            callback(module)
        else:
            self.waiting.setdefault(name, []).append(callback)


_FINDER = AfterImport()


def open_door(settings: Settings | None = None) -> None:
    """Have the models of this process get the hook. A second call changes nothing but the settings.

    Args:
        settings: by default those of the environment.
    """
    first = _FINDER not in sys.meta_path
    if first:
        sys.meta_path.insert(0, _FINDER)
    if settings is not None:
        os.environ.update(settings.environ())
    if first:
        _FINDER.when_imported(FIRST, _torch_is_there)


def _torch_is_there(_: ModuleType) -> None:
    """Check the expression as far as that needs no torch, and wait for every wrapper. Torch itself is half imported."""
    from commhooks.errors import CommHooksError
    from commhooks.launch import checking
    from commhooks.launch.wrapping import watch
    from commhooks.registry.registry import REGISTRY

    try:
        checking.check(Settings.of())
    except (CommHooksError, ValueError) as error:
        raise SystemExit(f"COMMHOOKS_HOOK: {type(error).__name__}: {error}") from None
    for _plugin, targets in REGISTRY.ask("commhooks_wraps"):
        for target in targets:
            module, _, attribute = target.partition(":")
            _FINDER.when_imported(module, functools.partial(watch, attribute=attribute))


def from_environment(*_: Any) -> None:
    """What ``commhooks-door.pth`` calls when ``COMMHOOKS_HOOK`` is set."""
    if os.environ.get("COMMHOOKS_HOOK"):
        open_door()
