"""Hook functions with PyTorch's names and signatures."""

from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist

from ch_quant.affine import quantize_per_channel, quantize_per_tensor
from ch_quant.quantized import quant8
from commhooks import GradBucket, as_hook

_PER_TENSOR = as_hook(quantize_per_tensor(), "quantization_pertensor_hook")
_QUANT8 = as_hook(quant8(), "quant8_hook")


@lru_cache
def _per_channel(bucket_size: int) -> Any:
    return as_hook(quantize_per_channel(bucket_size), "quantization_perchannel_hook")


def quantization_pertensor_hook(
    process_group: dist.ProcessGroup | None, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average by an all-gather of uint8, with one scale and zero point a parameter.

    Args:
        process_group: group to average over; ``None`` is the default group.
        bucket: DDP's bucket, in any floating dtype, which the result keeps.

    Returns:
        A future of the bucket's buffer.
    """
    return _PER_TENSOR(process_group, bucket)


def quantization_perchannel_hook(
    process_group: dist.ProcessGroup | None, bucket: GradBucket, bucket_size: int = 512
) -> torch.futures.Future[torch.Tensor]:
    """Average by an all-gather of uint8, with a scale and zero point for every ``bucket_size`` elements."""
    hook = _per_channel(bucket_size)
    result: torch.futures.Future[torch.Tensor] = hook(process_group, bucket)
    return result


def quant8_hook(process_group: dist.ProcessGroup | None, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average as :func:`~ch_quant.quant8` does with its defaults."""
    return _QUANT8(process_group, bucket)


quantization_pertensor_hook.reduction = _PER_TENSOR.reduction  # type: ignore[attr-defined]
quantization_perchannel_hook.reduction = quantize_per_channel()  # type: ignore[attr-defined]
quant8_hook.reduction = _QUANT8.reduction  # type: ignore[attr-defined]
