"""Buckets, requests, reductions and states of gradient communication, and the engine that runs them.

It imports torch alone. Names are imported when first used.
"""

from ch_core.faces import lazy

__getattr__, __dir__, __all__ = lazy(__name__, __file__)
