"""Public names of a package that are imported when first used (PEP 562), so that its import loads no torch.

The names stand once, in the stub `__init__.pyi` next to the package's `__init__.py`. Type checkers and editors read the
stub as they read any other, and `lazy` reads it at run time.
"""

import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any


def lazy(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` of a package.

    Args:
        package: its `__name__`.
        file: its `__file__`. The stub next to it has one line `from module import name as name` for each public name or module.

    Example:
        >>> get, listing, names = lazy("ch_core", sys.modules["ch_core"].__file__)
        >>> get("HookConfigError").__name__, "Bucket" in names
        ('HookConfigError', True)
    """
    homes: dict[str, tuple[str, str]] = {}
    with open(file.removesuffix("c") + "i", encoding="utf-8") as stub:
        for line in stub:
            if line.startswith("from "):
                _, module, _, name, _, public = line.split()
                homes[public] = module, name

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}; it has {', '.join(sorted(homes))}")
        module, attribute = homes[name]
        home = import_module(module)
        value = getattr(home, attribute) if hasattr(home, attribute) else import_module(f"{module}.{attribute}")
        setattr(sys.modules[package], name, value)  # the next access does not call this function
        return value

    def listing() -> list[str]:
        return sorted({*vars(sys.modules[package]), *homes})

    return get, listing, list(homes)
