"""A hook for an unchanged training script, and a check of every hook on this machine."""

from ch_core import lazy

__getattr__, __dir__, __all__ = lazy(__name__, __file__)
