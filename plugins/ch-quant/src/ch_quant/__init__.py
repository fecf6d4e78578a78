"""Quantized hooks: blocks of 8, 4, 2 or 1 bits in two stages, and PyTorch's two affine ones.

Names are imported at first use: ``commhooks list`` imports this package and must not load torch.
"""

from commhooks import lazy

__getattr__, __dir__, __all__ = lazy(__name__, __file__)
