"""One outer optimizer for ranks that are far apart, over any reduction: DiLoCo, Streaming DiLoCo, SparseLoCo, MuLoCo.

Names are imported at their first use, so importing the package does not load torch.
"""

from commhooks import lazy

__getattr__, __dir__, __all__ = lazy(__name__, __file__)
