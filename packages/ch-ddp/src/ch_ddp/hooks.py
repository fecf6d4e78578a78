"""PyTorch's hook functions, by PyTorch's names and signatures: ``hook(process_group, bucket)``.

``None`` as process group is the default group, as in PyTorch; :func:`commhooks.attach` takes the model's own.

Under ``torch._dynamo.config.optimize_ddp = "python_reducer"`` DDP calls a hook once per parameter with a tuple
``(grad, param)`` instead of a bucket and ignores what it returns; the stateless hooks do that too.
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
        process_group: group to average over; ``None`` is the default group.
        bucket: DDP's bucket.

    Returns:
        A future of the bucket's buffer, completed when the step's last bucket has been reduced.
    """
    if _per_parameter(bucket):
        return _compiled(process_group, bucket, None)
    return _ALLREDUCE(process_group, bucket)


def fp16_compress_hook(
    process_group: dist.ProcessGroup | None, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average with fp16 on the wire: divided by the world size, cast, summed, cast back to the buffer's dtype.

    A gradient that overflows fp16 on its own after the division arrives as inf, never clamped.
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
    """No communication: a completed future of the local buffer. For measuring head-room only."""
    if _per_parameter(bucket):
        return _unchanged(bucket)
    return _NOOP(state if isinstance(state, dist.ProcessGroup) else None, bucket)


for _function, _hook in (
    (allreduce_hook, _ALLREDUCE),
    (fp16_compress_hook, _FP16),
    (bf16_compress_hook, _BF16),
    (noop_hook, _NOOP),
):
    setattr(_function, "reduction", _hook.reduction)  # noqa: B010 - a function has no such attribute to a type checker


def _per_parameter(bucket: object) -> bool:
    """Whether this is compiled DDP's ``(grad, param)`` and not a bucket."""
    return isinstance(bucket, tuple)


def _unchanged(pair: Any) -> torch.futures.Future[torch.Tensor]:
    """The gradient as it is, where the python reducer wants it."""
    ignored: Any = pair[0]
    return ignored  # type: ignore[no-any-return]


def _compiled(
    process_group: dist.ProcessGroup | None, pair: Any, wire: torch.dtype | None
) -> torch.futures.Future[torch.Tensor]:
    """Average one gradient in place with a functional collective, which torch.compile can trace."""
    grad: torch.Tensor = pair[0]
    group = process_group if process_group is not None else dist.group.WORLD
    assert group is not None  # noqa: S101 - DDP needs one
    scaled = grad * (1.0 / dist.get_world_size(group))
    total = functional.all_reduce(scaled.to(wire) if wire is not None else scaled, "sum", group)
    grad.copy_(total)
    ignored: Any = grad  # by the python reducer
    return ignored  # type: ignore[no-any-return]
