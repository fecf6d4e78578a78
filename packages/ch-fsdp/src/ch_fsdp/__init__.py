"""Communication hooks for FSDP1 and FSDP2.

``commhooks.attach(model, "bf16_compress")`` finds the adapter by the model's class and needs no import of this package.
The package exports FSDP1's hooks and states with PyTorch's names and signatures. It imports them lazily, so that listing
hooks does not load torch.
"""

from typing import TYPE_CHECKING

from commhooks import lazy

if TYPE_CHECKING:
    from ch_fsdp.flat_sum import flat_bucket, flat_version
    from ch_fsdp.hooks import (
        DefaultState,
        LowPrecisionState,
        allreduce_hook,
        bf16_compress_hook,
        fp16_compress_hook,
        reduce_scatter_hook,
    )

__all__ = [
    "DefaultState",
    "LowPrecisionState",
    "allreduce_hook",
    "bf16_compress_hook",
    "flat_bucket",
    "flat_version",
    "fp16_compress_hook",
    "reduce_scatter_hook",
]

__getattr__, __dir__ = lazy(
    __name__,
    {
        "flat_sum": "flat_bucket flat_version",
        "hooks": "DefaultState LowPrecisionState allreduce_hook bf16_compress_hook fp16_compress_hook "
        "reduce_scatter_hook",
    },
)
