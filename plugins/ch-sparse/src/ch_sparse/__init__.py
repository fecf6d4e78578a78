"""Sparse hooks: the largest entries of every chunk (`topk`), and a random choice that all ranks make alike (`randomk`).

The names are imported when first used: commhooks imports this package to list what it offers, and listing must not
load torch.
"""

from typing import TYPE_CHECKING

from commhooks import lazy

if TYPE_CHECKING:
    from ch_sparse.randomk import RandomK
    from ch_sparse.topk import TopK

__all__ = ["RandomK", "TopK"]

__getattr__, __dir__ = lazy(__name__, {"randomk": "RandomK", "topk": "TopK"})
