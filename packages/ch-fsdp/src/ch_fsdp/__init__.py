"""Hooks for FSDP2, and FSDP1's hook functions.

``commhooks.attach(model, "bf16_compress")`` finds the adapter by the model's class and needs no import of this package.
The package exports FSDP1's hooks and states with PyTorch's names and signatures. It imports them lazily, so that listing
hooks does not load torch.
"""

from commhooks import lazy

__getattr__, __dir__, __all__ = lazy(__name__, __file__)
