"""Hooks that wrap or combine other hooks."""

from ch_core import lazy

__getattr__, __dir__, __all__ = lazy(__name__, __file__)
