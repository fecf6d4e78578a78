"""Adapters for trainers that own the training loop, one module each, and their common part."""

from commhooks import lazy

__getattr__, __dir__, __all__ = lazy(__name__, __file__)
