"""A process group of one, for DDP to talk to: what it sends by itself must reach nobody.

DDP verifies shapes and broadcasts parameters when it is made, and all-reduces a map of used parameters in every step.
Over a quorum that changes from step to step none of this may happen; members agree by healing. ``init_process_group``
is not needed.

There is one such group per process, never given up: a model that is its group's last owner destroys it when it is
collected, which joins gloo's thread while holding the interpreter lock, and that thread may be waiting for the lock to
drop what its last message carried. Both then wait for ever (seen on torch 2.13, with replicas as threads).
"""

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, ProcessGroupGloo

_MADE: dict[int, dist.ProcessGroup] = {}
"""By process: gloo's thread does not follow into a forked one, which keeps the parent's group but does not use it."""


def alone() -> dist.ProcessGroup:
    """The group of size 1 over gloo, for CPU and (if present) CUDA tensors."""
    process = os.getpid()
    if process not in _MADE:  # the first of several threads stands; what the others made has sent nothing, and may go
        _MADE.setdefault(process, _make())
    return _MADE[process]


def _make() -> dist.ProcessGroup:
    store = HashStore()
    group = dist.ProcessGroup(store, 0, 1)
    gloo = ProcessGroupGloo(store, 0, 1, timedelta(seconds=60))
    kind = dist.ProcessGroup.BackendType.GLOO
    group._set_default_backend(kind)
    for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
        group._register_backend(torch.device(device), kind, gloo)
    return group
