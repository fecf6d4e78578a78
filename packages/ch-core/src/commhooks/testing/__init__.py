"""Test kit: real gloo processes, simulated ranks, and the contract that every hook must pass.

The contract needs pytest (``pip install ch-core[testing]``), processes and simulated ranks do not. Names are imported when first
used.
"""

from commhooks._lazy import lazy
from commhooks.testing.spawn import spawn as spawn  # the function; a lazy name would find the module

__getattr__, __dir__, __all__ = lazy(__name__, __file__)
