"""Types that torch does not export by name.

DDP compares a hook's annotations with this class and refuses strings. A module that defines a hook must therefore not
postpone its annotations.
"""

from torch._C._distributed_c10d import GradBucket

__all__ = ["GradBucket"]
