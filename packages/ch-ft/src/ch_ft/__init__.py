"""Fault-tolerant data parallelism with gradient compression, over a torchft Manager.

`DistributedDataParallel(manager, module, hook="powersgd(rank=4)")` trains on while members die and come back. If a
member dies in a step, neither the optimizer nor the hook commits it. A returning member receives the state of a peer.
torchft decides membership and votes, and transfers the state.
"""

from commhooks import lazy

__getattr__, __dir__, __all__ = lazy(__name__, __file__)
