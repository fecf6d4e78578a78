"""A hook's options, declared once: what its spec says of them, what is checked, and what the hook holds."""

from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields, replace
from typing import Any, Literal, get_args, get_origin

from commhooks.errors import HookConfigError
from commhooks.registry.specs import Param, Value


def option(default: Value, doc: str, **limits: Any) -> Any:
    """A field of an :class:`Options`.

    Args:
        default: the value when none is given.
        doc: one line, with the unit.
        limits: what else :class:`Param` takes: ``at_least``, ``above``, ``at_most``, ``choices``, ``brings``, ``local``, ...

    Example:
        >>> option(0.01, "fraction of entries sent", above=0.0).metadata["param"].accepts()
        'a float > 0'
    """
    return field(default=default, metadata={"param": Param(default, doc, **limits)})


@dataclass(frozen=True, eq=False, repr=False)
class Options:
    """Options of a hook, each a dataclass field with its default, its meaning and its limits.

    The hook's class inherits them, before :class:`Reduction`, and with them the constructor, the checks and ``config()``.
    Its spec takes them from :meth:`params`. What is annotated as a ``Literal`` has its values as choices. Declare them in
    a module that imports no torch, because listing hooks must not. ``repr=False``: a hook prints itself as an expression.

    Raises:
        HookConfigError: when it is made, for a value that its option does not accept.

    Example:
        >>> from dataclasses import dataclass
        >>> @dataclass(frozen=True, eq=False, repr=False)
        ... class TopKOptions(Options):
        ...     rate: float = option(0.01, "fraction of entries sent", above=0.0, at_most=1.0)
        ...     start_iter: int = option(0, "steps averaged exactly before", at_least=0)
        >>> TopKOptions(rate=1).config()
        {'rate': 1.0, 'start_iter': 0}
        >>> TopKOptions.params()["start_iter"].accepts()
        'an int >= 0'
        >>> TopKOptions(start_iter=-1)
        Traceback (most recent call last):
        ...
        commhooks.errors.HookConfigError: start_iter=-1: expected an int >= 0 (steps averaged exactly before)
    """

    def __post_init__(self) -> None:
        for name, param in self.params().items():
            object.__setattr__(self, name, param.checked(name, getattr(self, name)))

    @classmethod
    def params(cls) -> Mapping[str, Param]:
        """The declarations by name, for ``HookSpec(params=...)``."""
        bare = [name for each in cls.__mro__ for name, value in vars(each).items() if isinstance(value, Field)]
        flags: Any = cls
        if bare or flags.__dataclass_params__.eq:  # equal hooks would be given one another's views and layouts
            what = f"{cls.__name__}.{bare[0]} is no field" if bare else f"{cls.__name__} compares by value"
            raise HookConfigError(f"{what}: write @dataclass(frozen=True, eq=False, repr=False) above the options")
        return {one.name: _declared(one) for one in fields(cls) if "param" in one.metadata}

    def config(self) -> dict[str, Any]:
        """Options that rebuild this, as plain values."""
        return {name: getattr(self, name) for name in self.params()}


def _declared(one: "Field[Any]") -> Param:
    param: Param = one.metadata["param"]
    if isinstance(one.type, str) and "Literal[" in one.type and not param.choices:
        raise HookConfigError(
            f"{one.name}: the values of a Literal cannot be read where annotations are postponed: "
            "drop the import of annotations from __future__, or give choices="
        )
    if get_origin(one.type) is not Literal:
        return param
    choices = get_args(one.type)
    return replace(param, choices=choices, optional=None in choices)
