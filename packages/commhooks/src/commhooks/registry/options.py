"""Options of a hook: declared once, then checked, described and held by the hook. Imports no torch."""

import math
from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields, replace
from typing import Any, Literal, get_args, get_origin

from ch_core import HookConfigError

Scalar = int | float | bool | str | None
Value = Scalar | list["Value"]
"""Value of an option. JSON and hook expressions both write it without loss."""


@dataclass(frozen=True, slots=True)
class Option:
    """One option of a hook: its default, its meaning, and the values it accepts.

    The default sets the type. An option of type `float` accepts an `int`; no number is accepted for a `bool`, nor a
    `bool` for a number. Numbers must be finite, because NaN would pass every comparison with a limit.

    Args:
        default: used if the user sets no value.
        doc: one line, with the unit.
        at_least, above, at_most: limits of a number.
        choices: accepted values, if they can be listed.
        brings: keys of `CAPABILITIES` that hold for the hook unless this option has a value in `off`.
        off: values that bring nothing.
        optional: True if `None` is accepted. A default of `None` implies it, and then accepts any scalar.
        hook: True if the value is the expression of another hook, which is checked, too.
        local: True if each rank may have its own value, because neither messages nor state depend on it. Ranks
            do not compare such options, and a state loads whatever their values are.
        kind: type in words, for an option of default `None`, e.g. `"an int"`.

    Example:
        >>> Option(1, "rank of P and Q", at_least=1).accepts()
        'an int >= 1'
    """

    default: Value
    doc: str
    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    choices: tuple[Scalar, ...] = ()
    optional: bool = False
    brings: frozenset[str] = frozenset()
    off: tuple[Scalar, ...] = (False, None)
    local: bool = False
    hook: bool = False
    kind: str = ""

    def accepts(self) -> str:
        """Return the accepted values in words."""
        if self.hook:
            return "a hook expression"
        if self.choices:
            return "one of " + ", ".join(repr(choice) for choice in self.choices)
        limits = [
            f"{sign} {limit:g}"
            for sign, limit in ((">=", self.at_least), (">", self.above), ("<=", self.at_most))
            if limit is not None
        ]
        kind = type(self.default).__name__
        noun = f"{self.kind or 'any scalar'} or None"
        if self.default is not None:
            noun = f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}"
        return noun + (" " + " and ".join(limits) if limits else "") + (" or None" if self.optional else "")

    def check(self, value: Value) -> Value:
        """Return the value that the hook receives. An `int` given for a `float` becomes a `float`.

        Raises:
            ValueError: naming the accepted values. The caller adds the names of hook and option.
        """
        if value is None and (self.optional or self.default is None):
            return None
        if isinstance(self.default, float) and type(value) is int:
            value = float(value)
        legal = self.default is None or type(value) is type(self.default)
        legal = legal and (not self.choices or value in self.choices)
        if legal and isinstance(value, (int, float)) and not isinstance(value, bool):
            legal = (
                math.isfinite(value)
                and (self.at_least is None or value >= self.at_least)
                and (self.above is None or value > self.above)
                and (self.at_most is None or value <= self.at_most)
            )
        if not legal:
            raise ValueError(self.accepts())
        return value

    def checked(self, name: str, value: Value) -> Value:
        """Return :meth:`check` of the value of the option `name`.

        Raises:
            HookConfigError: naming the option, the value, the accepted values and the meaning.
        """
        try:
            return self.check(value)
        except ValueError:
            raise HookConfigError(f"{name}={value!r}: expected {self.accepts()} ({self.doc})") from None


def option(default: Value, doc: str, **limits: Any) -> Any:
    """Declare one field of an :class:`Options` class.

    Args:
        default: used if the user sets no value.
        doc: one line, with the unit.
        limits: further arguments of :class:`Option`: `at_least`, `above`, `at_most`, `choices`, `local`, ...

    Example:
        >>> option(0.01, "fraction of entries sent", above=0.0).metadata["option"].accepts()
        'a float > 0'
    """
    return field(default=default, metadata={"option": Option(default, doc, **limits)})


@dataclass(frozen=True, eq=False, repr=False)
class Options:
    """Options of a hook as dataclass fields, each with its default, its meaning and its limits.

    The hook's class inherits from its options class and from :class:`~commhooks.Reduction`, in that order. It thereby
    gets the constructor, the checks and `config()`. Its spec takes `options=MyOptions.options()`. The values of a
    `Literal` annotation become the choices. Declare options in a module that imports no torch, because listing hooks
    must not import it. `repr=False` lets the hook print itself as an expression.

    Raises:
        HookConfigError: at construction, if an option does not accept its value.

    Example:
        >>> from dataclasses import dataclass
        >>> @dataclass(frozen=True, eq=False, repr=False)
        ... class TopKOptions(Options):
        ...     rate: float = option(0.01, "fraction of entries sent", above=0.0, at_most=1.0)
        ...     start_iter: int = option(0, "steps averaged exactly before", at_least=0)
        >>> TopKOptions(rate=1).config()
        {'rate': 1.0, 'start_iter': 0}
        >>> TopKOptions.options()["start_iter"].accepts()
        'an int >= 0'
        >>> TopKOptions(start_iter=-1)
        Traceback (most recent call last):
        ...
        ch_core.errors.HookConfigError: start_iter=-1: expected an int >= 0 (steps averaged exactly before)
    """

    def __post_init__(self) -> None:
        for name, declared in self.options().items():
            object.__setattr__(self, name, declared.checked(name, getattr(self, name)))

    @classmethod
    def options(cls) -> Mapping[str, Option]:
        """Return the declared options by name, for `HookSpec(options=...)`.

        Raises:
            HookConfigError: the class lacks `@dataclass(frozen=True, eq=False, repr=False)`, or annotations are
                postponed.
        """
        bare = [name for each in cls.__mro__ for name, value in vars(each).items() if isinstance(value, Field)]
        flags: Any = cls
        if bare or flags.__dataclass_params__.eq:  # equal hooks would share cached views and layouts
            problem = f"{cls.__name__}.{bare[0]} is not a field" if bare else f"{cls.__name__} compares by value"
            raise HookConfigError(f"{problem}: write @dataclass(frozen=True, eq=False, repr=False) above the options")
        return {one.name: _with_choices(one) for one in fields(cls) if "option" in one.metadata}

    def config(self) -> dict[str, Any]:
        """Return the values by name. They rebuild this object."""
        return {name: getattr(self, name) for name in self.options()}


def _with_choices(one: "Field[Any]") -> Option:
    """Return a field's option, its choices read from a `Literal` annotation."""
    declared: Option = one.metadata["option"]
    if isinstance(one.type, str) and "Literal[" in one.type and not declared.choices:
        raise HookConfigError(
            f"{one.name}: postponed annotations hide the values of its Literal. Remove `from __future__ import "
            "annotations`, or give choices="
        )
    if get_origin(one.type) is not Literal:
        return declared
    choices = get_args(one.type)
    return replace(declared, choices=choices, optional=None in choices)
