"""DDP communication hooks and wrappers, with the names and signatures of PyTorch.

Imported lazily, so that listing hooks does not load torch.
"""

from commhooks import lazy

__getattr__, __dir__, __all__ = lazy(__name__, __file__)
