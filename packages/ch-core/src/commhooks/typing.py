"""Types that torch does not export by name.

DDP checks a hook's annotations against this very class, and refuses strings: never postpone annotations in a module
that defines a hook.
"""

from torch._C._distributed_c10d import GradBucket

__all__ = ["GradBucket"]
