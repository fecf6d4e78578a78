"""Base classes from packages that need not be installed."""

import sys
from importlib import import_module


def bases(name: str, *modules: str) -> tuple[type, ...]:
    """The class of this name in each of the modules whose package is in use; if none is, in the first that is installed.

    Lightning comes as two packages with classes of their own, and a trainer takes those of its own package only.

    Returns:
        The classes; empty if no package is installed.

    Example:
        >>> bases("OrderedDict", "not_installed.there", "collections"), bases("OrderedDict", "not_installed")
        ((<class 'collections.OrderedDict'>,), ())
    """
    used = [module for module in modules if module in sys.modules]
    found: list[type] = []
    for module in used or modules:
        try:
            found.append(getattr(import_module(module), name))
        except ImportError:
            continue
        if not used:
            break
    return tuple(found)
