"""PyTorch's hook functions, with PyTorch's names and signature ``hook(process_group, bucket)``.

A process group of None means the default group, as in PyTorch. :func:`commhooks.attach` uses the model's group.

Under ``torch._dynamo.config.optimize_ddp = "python_reducer"`` DDP passes ``(grad, param)`` of one parameter instead of
a bucket, and ignores the result. The stateless hooks support this.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from ch_ddp.hook_function import as_hook
from ch_ddp.reductions import allreduce, bf16_compress, fp16_compress, noop
from commhooks import GradBucket

_ALLREDUCE = as_hook(allreduce(), "allreduce_hook")
_FP16 = as_hook(fp16_compress(), "fp16_compress_hook")
_BF16 = as_hook(bf16_compress(), "bf16_hook")
_NOOP = as_hook(noop(), "noop_hook")


def allreduce_hook(process_group: dist.ProcessGroup | None, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average the bucket exactly.

    Args:
        process_group: group to average over. None means the default group.
        bucket: DDP's bucket.

    Returns:
        A future of the bucket's buffer, ``(numel,)``. It completes when the step's last bucket has been reduced.
    """
    if _per_parameter(bucket):
        return _compiled(process_group, bucket, None)
    return _ALLREDUCE(process_group, bucket)


def fp16_compress_hook(
    process_group: dist.ProcessGroup | None, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average with fp16 on the wire: divide by the world size, cast, sum, cast back to the buffer's dtype.

    A gradient that still overflows fp16 after the division arrives as Inf.
    """
    if _per_parameter(bucket):
        return _compiled(process_group, bucket, torch.float16)
    return _FP16(process_group, bucket)


def bf16_compress_hook(
    process_group: dist.ProcessGroup | None, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average with bf16 on the wire, on gloo too."""
    if _per_parameter(bucket):
        return _compiled(process_group, bucket, torch.bfloat16)
    return _BF16(process_group, bucket)


# DDP refuses any hook called "bf16_compress_hook" without CUDA, by that name alone.
bf16_compress_hook.__name__ = bf16_compress_hook.__qualname__ = "bf16_hook"
bf16_hook = bf16_compress_hook  # pickle finds a function by its name


def noop_hook(state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Return a completed future of the local buffer, without communication. Use it for measurements only."""
    if _per_parameter(bucket):
        return _unchanged(bucket)
    return _NOOP(state if isinstance(state, dist.ProcessGroup) else None, bucket)


for _function, _hook in (
    (allreduce_hook, _ALLREDUCE),
    (fp16_compress_hook, _FP16),
    (bf16_compress_hook, _BF16),
    (noop_hook, _NOOP),
):
    setattr(_function, "reduction", _hook.reduction)  # noqa: B010 - type checkers know no such attribute of functions


def _per_parameter(bucket: object) -> bool:
    """Return True if compiled DDP passed ``(grad, param)`` instead of a bucket."""
    return isinstance(bucket, tuple)


def _unchanged(pair: Any) -> torch.futures.Future[torch.Tensor]:
    """Return the gradient unchanged, as the python reducer expects."""
    ignored: Any = pair[0]
    return ignored  # type: ignore[no-any-return]


def _compiled(
    process_group: dist.ProcessGroup | None, pair: Any, wire: torch.dtype | None
) -> torch.futures.Future[torch.Tensor]:
    """Average one gradient in place with a functional collective, because torch.compile can trace it."""
    grad: torch.Tensor = pair[0]
    group = process_group if process_group is not None else dist.group.WORLD
    assert group is not None  # noqa: S101 - DDP needs one
    scaled = grad * (1.0 / dist.get_world_size(group))
    total = functional.all_reduce(scaled.to(wire) if wire is not None else scaled, "sum", group)
    grad.copy_(total)
    ignored: Any = grad  # by the python reducer
    return ignored  # type: ignore[no-any-return]
