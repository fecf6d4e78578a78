"""Sparse hooks: the largest entries of every chunk (`topk`), and the same random entries on all ranks (`randomk`).

Names are imported at first use: ``commhooks list`` imports this package and must not load torch.
"""

from commhooks import lazy

__getattr__, __dir__, __all__ = lazy(__name__, __file__)
