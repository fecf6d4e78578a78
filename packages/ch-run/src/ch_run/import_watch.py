"""Waits for the import of torch and of the model wrappers, and imports none of them.

`commhooks run` calls :func:`watch` in its own process. Other processes, those of a launcher or of the script, read a variable
instead: `COMMHOOKS_HOOK`, `COMMHOOKS_OUTER` or `COMMHOOKS_GATHER`. ch-run installs `commhooks-hook.pth`, one line that the
interpreter runs when it starts. It imports nothing unless a variable is set. Until torch is imported, this module needs the
standard library only.
"""

import functools
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

from ch_run import live_optimizers
from ch_run.settings import Settings

TORCH = "torch.nn.parallel.distributed"
"""Imported by `import torch`, and the first module that can make a model for a hook."""
FSDP1 = "torch.distributed.fsdp.fully_sharded_data_parallel:FullyShardedDataParallel"
"""Module and class of FSDP1. `attach` refuses its models. Unwatched, they would train without a hook or an error."""

OPTIMIZERS = "torch.optim.optimizer"

NAMED = ("COMMHOOKS_HOOK", "COMMHOOKS_OUTER", "COMMHOOKS_GATHER")
"""Variables that name a hook or an outer optimizer."""


class ImportWatch:
    """A finder on `sys.meta_path` that calls back when a module has been executed. It finds no module itself."""

    def __init__(self) -> None:
        self.waiting: dict[str, list[Callable[[ModuleType], None]]] = {}
        self.executed: set[str] = set()  # the import of these modules has not ended when they call back

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: object = None) -> ModuleSpec | None:
        """Return the spec that the other finders give, with a loader that calls back."""
        if name not in self.waiting:
            return None
        callbacks = self.waiting.pop(name)  # before the next line, which asks this finder once more
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        loader, run = spec.loader, spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            vars(loader).pop("exec_module", None)  # other code that inspects the loader sees the original method
            run(module)
            self.executed.add(name)
            for callback in callbacks:
                callback(module)

        loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec

    def when_imported(self, name: str, callback: Callable[[ModuleType], None]) -> None:
        """Call `callback(module)` now if the module is imported, otherwise after its import."""
        module = sys.modules.get(name)
        importing = getattr(getattr(module, "__spec__", None), "_initializing", False)
        if module is not None and (name in self.executed or not importing):
            callback(module)
        else:
            self.waiting.setdefault(name, []).append(callback)


_WATCH = ImportWatch()


def watch(settings: Settings | None = None) -> None:
    """Give the models of this process the hook. A second call changes the settings only.

    Args:
        settings: by default those of the environment.
    """
    first = _WATCH not in sys.meta_path
    if first:
        sys.meta_path.insert(0, _WATCH)
    if settings is not None:
        os.environ.update(settings.environ())
    if first:
        _WATCH.when_imported(TORCH, _torch_imported)


def _torch_imported(_: ModuleType) -> None:
    """Check names and declared options, and wait for every wrapper.

    torch is half imported here, so no hook can be imported. `attach` refuses other options at the first forward.
    """
    from commhooks import REGISTRY, CommHooksError

    try:
        Settings.of().check()
    except (CommHooksError, ValueError) as error:
        variables = " and ".join(name for name in NAMED if os.environ.get(name))
        raise SystemExit(f"{variables}: {type(error).__name__}: {error}") from None
    _WATCH.when_imported(OPTIMIZERS, live_optimizers.watch_optimizers)
    wraps = [target for _, targets in REGISTRY.ask("commhooks_wraps") for target in targets]
    for target in [*wraps, FSDP1]:
        _WATCH.when_imported(target.partition(":")[0], functools.partial(_watch_wrapper, target))


def _watch_wrapper(target: str, module: ModuleType) -> None:
    """Watch one wrapper. A plugin may name one that cannot be patched, which must not end the import of its module."""
    from ch_core import log
    from ch_run.first_forward import watch_wrapper

    try:
        watch_wrapper(module, target.partition(":")[2])
    except Exception as error:
        log.warning("commhooks run: models of %s train without a hook, because it cannot be watched: %r", target, error)


def from_environment() -> None:
    """Watch if a variable names a hook or an outer optimizer. `commhooks-hook.pth` calls this."""
    if any(os.environ.get(name) for name in NAMED):
        watch()
