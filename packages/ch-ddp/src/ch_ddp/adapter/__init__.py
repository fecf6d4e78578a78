"""Adapter for ``DistributedDataParallel``, with the parts that classes derived from DDP build on."""

from commhooks import lazy

__getattr__, __dir__, __all__ = lazy(__name__, __file__)
