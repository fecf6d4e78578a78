"""Checks of configuration values: what was given, what is legal."""

import math
from collections.abc import Sequence
from typing import TypeVar

from commhooks.errors import HookConfigError

T = TypeVar("T")


def whole(name: str, value: int, least: int) -> int:
    """An integer of at least ``least``.

    >>> whole("rank", 0, 1)
    Traceback (most recent call last):
    commhooks.errors.HookConfigError: rank=0: expected an integer of at least 1
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise HookConfigError(f"{name}={value!r}: expected an integer of at least {least}")
    return value


def at_least(name: str, value: float, least: float) -> float:
    """A finite number of at least ``least``."""
    if not _number(value) or value < least:
        raise HookConfigError(f"{name}={value!r}: expected a finite number of at least {least:g}")
    return value


def positive(name: str, value: float) -> float:
    """A finite number above zero."""
    if not _number(value) or value <= 0:
        raise HookConfigError(f"{name}={value!r}: expected a finite number above 0")
    return value


def flag(name: str, value: bool) -> bool:
    """``True`` or ``False``."""
    if not isinstance(value, bool):
        raise HookConfigError(f"{name}={value!r}: expected True or False")
    return value


def one_of(name: str, value: T, legal: Sequence[T]) -> T:
    """One of a few values."""
    if value not in legal:
        raise HookConfigError(f"{name}={value!r}: expected one of {', '.join(map(repr, legal))}")
    return value


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
