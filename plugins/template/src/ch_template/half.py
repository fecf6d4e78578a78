"""The hook: cast, average, cast back.

``g <- fp32(mean(bf16(g / W)))``. Replace this by your method. It yields requests, and when the engine
resumes it, their tensors hold the result. It never sees a process group, so the same code runs over DDP, FSDP2 and
simulated ranks.
"""

from typing import Any

import torch

from commhooks import AllReduce, Bucket, HookConfigError, Reduction, Stages, StepContext

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


class Half(Reduction):
    """Average in 16 bits.

    Args:
        dtype: ``"bfloat16"`` or ``"float16"``.

    Raises:
        HookConfigError: another dtype.
    """

    name = "half"
    lossy = True
    reports_sent = True  # so that error_feedback(half) works

    def __init__(self, dtype: str = "bfloat16") -> None:
        if dtype not in DTYPES:
            raise HookConfigError(f"dtype={dtype!r}: expected one of {sorted(DTYPES)}")
        self.dtype = dtype

    def config(self) -> dict[str, Any]:
        return {"dtype": self.dtype}

    def run(self, bucket: Bucket, ctx: StepContext) -> Stages:
        flat = bucket.buffer  # (elements of the bucket,)
        small = ctx.scratch("small", flat.shape, DTYPES[self.dtype], bucket.device)
        torch.mul(
            flat, 1.0 / ctx.world_size, out=small
        )  # divide before the cast, or the sum may overflow although the mean fits
        if ctx.sent is not None:
            # A new tensor: on a 16-bit model `small.to(...)` is `small` itself, and `mul_` would send W times too much.
            ctx.sent.buffer = small.to(flat.dtype) * ctx.world_size
        yield AllReduce(small, "sum")
        bucket.buffer = small.to(flat.dtype)
