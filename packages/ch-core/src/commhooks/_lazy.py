"""Module attributes imported when first used (PEP 562), for packages whose import must not load torch."""

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The `__getattr__` and `__dir__` of a package.

    Args:
        package: its `__name__`.
        homes: by submodule, the names it defines, separated by spaces.

    Example:
        >>> get, listing = lazy("collections", {"abc": "Mapping Sequence"})
        >>> get("Mapping").__name__
        'Mapping'
    """
    home = {name: module for module, names in homes.items() for name in names.split()}

    def get(name: str) -> Any:
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}; it has {', '.join(sorted(home))}")
        value = getattr(import_module(f"{package}.{home[name]}"), name)
        setattr(sys.modules[package], name, value)  # the next access does not come here
        return value

    def listing() -> list[str]:
        return sorted({*vars(sys.modules[package]), *home})

    return get, listing
