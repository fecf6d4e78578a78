"""Average gradients in bf16."""

import torch

from commhooks import AllReduce, Bucket, Reduction, Stages, StepContext


class Half(Reduction):
    """Average bf16 copies of the gradients."""

    name = "half"
    lossy = True  # the result differs from the average by more than rounding of the gradient's dtype

    def run(self, bucket: Bucket, ctx: StepContext) -> Stages:
        small = bucket.buffer.to(torch.bfloat16)  # encode: (elements of the bucket,)
        yield AllReduce(small)  # the engine averages `small` over all ranks, and resumes
        bucket.buffer = small.to(bucket.dtype)  # decode: assign, because the buffer may be a gathered copy
