"""Hooks under trainers that own the training loop: a module for each, and what they have in common."""

from commhooks import lazy

__getattr__, __dir__, __all__ = lazy(__name__, __file__)
