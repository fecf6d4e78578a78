"""PowerSGD as plain hooks with PyTorch's signature, for ``model.register_comm_hook(state, hook)``.

Each hook has an attribute ``reduction``, a function that makes its reduction from the state. Wrappers use it to change
the messages of PowerSGD. Without it they could only cast the bucket.
"""

from functools import partial
from typing import Any

import torch

from ch_powersgd.powersgd import PowerSGD
from ch_powersgd.state import PowerSGDState
from commhooks import GradBucket, HookConfigError, as_hook


def _reduction(hook: str, batched: bool, state: Any) -> PowerSGD:
    if isinstance(state, PowerSGDState):
        return state.reduction(batched)
    raise HookConfigError(
        f"{hook} got a {type(state).__module__}.{type(state).__name__} as its state. It needs a "
        "ch_powersgd.PowerSGDState, which takes the same arguments as PyTorch's: from ch_powersgd import PowerSGDState; "
        f"model.register_comm_hook(PowerSGDState(process_group, ...), {hook})"
    )


_PER_MATRIX = as_hook(partial(_reduction, "powerSGD_hook", False), "powerSGD_hook")
_PER_BUCKET = as_hook(partial(_reduction, "batched_powerSGD_hook", True), "batched_powerSGD_hook")


def powerSGD_hook(state: PowerSGDState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average gradients with PowerSGD per matrix, for any number of buckets.

    Returns:
        A future of the averaged gradient, ``(numel,)``, in the bucket's own buffer and dtype.

    Raises:
        HookConfigError: ``state`` is not a :class:`~ch_powersgd.PowerSGDState`.

    Example:
        >>> import torch, torch.distributed as dist
        >>> from torch.nn.parallel import DistributedDataParallel
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> model = DistributedDataParallel(torch.nn.Linear(64, 64))
        >>> state = PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
        >>> model.register_comm_hook(state, powerSGD_hook)
        >>> for _ in range(4):
        ...     model(torch.randn(8, 64)).square().sum().backward()
        >>> state.iter, state.compression_stats()  # two of four steps: 64*64 + 64 elements as 2*(64 + 64) + 64
        (4, (13.0, 8320, 640))
        >>> dist.destroy_process_group()
    """
    return _PER_MATRIX(state, bucket)


def batched_powerSGD_hook(state: PowerSGDState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average gradients with PowerSGD per bucket (see :class:`~ch_powersgd.BatchedPowerSGD`)."""
    return _PER_BUCKET(state, bucket)


powerSGD_hook.reduction = _PER_MATRIX.reduction  # type: ignore[attr-defined]
batched_powerSGD_hook.reduction = _PER_BUCKET.reduction  # type: ignore[attr-defined]
