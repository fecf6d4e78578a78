"""Fault-tolerant data parallelism with gradient compression, over a torchft Manager.

`DistributedDataParallel(manager, module, hook="powersgd(rank=4)")` trains on while members die and come back: a step
that a dying member spoilt is not committed, by the optimizer or by the hook, and a returning member is healed.
torchft does membership, healing and voting; nothing here replaces it.
"""

from commhooks import lazy

__getattr__, __dir__, __all__ = lazy(__name__, __file__)
