"""PowerSGD as plain hooks with PyTorch's signature, for ``model.register_comm_hook(state, hook)``.

Each carries the function that makes its reduction from the state (``hook.reduction``), so that a wrapper changes what
travels instead of casting the bucket.
"""

from typing import Any

import torch

from ch_powersgd.reduction import BatchedPowerSGD, PowerSGD
from ch_powersgd.state import PowerSGDState
from commhooks import GradBucket, HookConfigError, as_hook

TensorFuture = torch.futures.Future[torch.Tensor]


def _of(state: Any, hook: str) -> PowerSGDState:
    if not isinstance(state, PowerSGDState):
        if type(state).__module__.startswith("torch."):
            raise HookConfigError(
                f"{hook} was given PyTorch's {type(state).__name__}, which keeps its memory by bucket: import this "
                "package's instead, with the same arguments: from ch_powersgd import PowerSGDState"
            )
        raise HookConfigError(
            f"the state of {hook} is a ch_powersgd.PowerSGDState, got {type(state).__name__}: "
            f"model.register_comm_hook(PowerSGDState(process_group, ...), {hook})"
        )
    return state


def _per_matrix(state: Any) -> PowerSGD:
    return _of(state, "powerSGD_hook").reduction()


def _per_bucket(state: Any) -> BatchedPowerSGD:
    return _of(state, "batched_powerSGD_hook").batched_reduction()


_PER_MATRIX = as_hook(_per_matrix, "powerSGD_hook")
_PER_BUCKET = as_hook(_per_bucket, "batched_powerSGD_hook")


def powerSGD_hook(state: PowerSGDState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """PowerSGD of each gradient matrix; any number of buckets.

    Args:
        state: serves one model.
        bucket: torch's bucket.

    Returns:
        A future of the averaged gradient, in the bucket's own buffer and dtype.

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
    return _PER_MATRIX(_of(state, "powerSGD_hook"), bucket)


def batched_powerSGD_hook(state: PowerSGDState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """PowerSGD of each bucket as one near-square matrix: see :class:`~ch_powersgd.BatchedPowerSGD`.

    Args and errors as for :func:`powerSGD_hook`; ``batch_tensors_with_same_shape`` has no meaning here.
    """
    return _PER_BUCKET(_of(state, "batched_powerSGD_hook"), bucket)


powerSGD_hook.reduction = _per_matrix  # type: ignore[attr-defined]
batched_powerSGD_hook.reduction = _per_bucket  # type: ignore[attr-defined]
