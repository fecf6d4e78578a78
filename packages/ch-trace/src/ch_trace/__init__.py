"""A time line of all ranks, and telemetry of each step."""

from ch_core import lazy

__getattr__, __dir__, __all__ = lazy(__name__, __file__)
