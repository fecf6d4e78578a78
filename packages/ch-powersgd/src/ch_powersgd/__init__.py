"""PowerSGD gradient compression (Vogels, Karimireddy, Jaggi 2019, arXiv:1905.13727).

Public names load on first use, so that listing hooks imports no torch.
"""

from commhooks import lazy

__getattr__, __dir__, __all__ = lazy(__name__, __file__)
