"""Sparse hooks: the largest entries of every chunk (`topk`), and the same random entries on all ranks (`randomk`).

Names are imported at first use: ``commhooks list`` imports this package and must not load torch.
"""

from typing import TYPE_CHECKING

from commhooks import lazy

if TYPE_CHECKING:
    from ch_sparse.randomk import RandomK
    from ch_sparse.topk import TopK

__all__ = ["RandomK", "TopK"]

__getattr__, __dir__ = lazy(__name__, {"randomk": "RandomK", "topk": "TopK"})
