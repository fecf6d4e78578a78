"""Communication hooks for FSDP1 and FSDP2.

``commhooks.attach(model, "bf16_compress")`` needs nothing from here: the adapters are found by the model's class. What
is exported are FSDP1's hooks and states with PyTorch's names and signatures. Imported lazily, so that listing hooks
does not load torch.
"""

from typing import TYPE_CHECKING

from commhooks import lazy

if TYPE_CHECKING:
    from ch_fsdp.flat_reduction import flat_bucket, flat_version
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
        "flat_reduction": "flat_bucket flat_version",
        "hooks": "DefaultState LowPrecisionState allreduce_hook bf16_compress_hook fp16_compress_hook "
        "reduce_scatter_hook",
    },
)
