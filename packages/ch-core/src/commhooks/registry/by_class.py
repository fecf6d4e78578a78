"""What plugins offer for a class of somebody else's: adapters by the model's class, managers by theirs."""

from collections.abc import Mapping
from typing import Any

from commhooks.errors import AttachError
from commhooks.registry.discovery import load_target
from commhooks.registry.metadata import not_installed


def class_names(served: object) -> list[str]:
    """The full names of an object's class and its bases, in the order in which Python looks them up."""
    return [f"{cls.__module__}.{cls.__qualname__}" for cls in type(served).__mro__]


def offered_for(served: object, offered: Mapping[str, str], known: Mapping[str, str], what: str) -> Any:
    """What is offered for the first of an object's classes that anything is offered for; ``None`` if nothing is.

    Args:
        served: the object.
        offered: class name -> target, of the plugins that are installed.
        known: class name -> package of this project, installed or not.
        what: what is looked for.

    Raises:
        AttachError: its package is not installed.
    """
    names = class_names(served)
    for name in names:
        if name in offered:
            return load_target(offered[name])
    for name in names:
        if name in known:
            raise AttachError(f"{what} comes with {known[name]}, {not_installed(known[name])}")
    return None
