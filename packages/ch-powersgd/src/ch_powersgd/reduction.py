"""PowerSGD: gradients as products of two thin matrices (Vogels, Karimireddy, Jaggi, NeurIPS 2019).

For every gradient matrix G ``(rows, cols)``, with residual e and Q kept from the step before::

    D   = G + e                  what is to be sent
    P   = D orth(Q)              (rows, rank), all-reduced (mean)
    Q_i = D^T orth(P)            (cols, rank), all-reduced (mean) to Q
    G  <- orth(P) Q^T            the averaged gradient, the same on all ranks
    e  <- D - orth(P) Q_i^T      what this rank did not get across

On the wire: one fp32 tensor of all P's and one of all Q's; the parameters that are not compressed travel beside the P's.

Two things differ from the paper's code. Q is orthonormalised before it is used, so that P has the unit of the
gradient and survives a 16-bit wire. The residual is the rank's own, and is counted after rounding on the wire, so
that input = sent + residual holds exactly; ``residual="averaged"`` subtracts what all ranks sent together, as
PyTorch's hook does.
"""

import math
from collections.abc import Hashable, Sequence
from types import MappingProxyType
from typing import Literal

from ch_powersgd.config import PowerSGDConfig
from ch_powersgd.steps import Steps
from ch_powersgd.workspace import Stack, Workspace, batches
from commhooks import AllReduce, Bucket, BucketLayout, ParamLayout, Plain, Reduction, Stages, StepContext, per_layout
from commhooks.numerics import exact_products


class PowerSGD(PowerSGDConfig, Reduction):
    """Rank-``rank`` approximation of each gradient matrix, with error feedback and warm start.

    Args:
        rank, start_iter, min_compression_rate, residual, error_feedback, warm_start, epsilon, seed: in this order; their
            defaults, limits and meaning are in ``ch_powersgd.config``, and ``commhooks describe powersgd`` prints them.

    Raises:
        HookConfigError: a value out of range.

    State per parameter: ``residual`` ``(rows, cols)`` fp32 (fp64 for fp64 gradients), ``q`` ``(rank, cols)``. Results
    do not depend on which bucket a parameter is in (on more than two ranks but for the order of addition).

    Example:
        >>> import torch
        >>> from commhooks.simulate import simulate
        >>> def two_steps(rank):
        ...     engine = rank.engine(PowerSGD(rank=1))
        ...     for _ in range(2):
        ...         bucket = Bucket.from_tensors({"w": torch.outer(torch.arange(8.0), torch.ones(16))})
        ...         engine.submit(bucket)
        ...         engine.finish()
        ...     return bucket.view("w")
        >>> torch.allclose(simulate(2, two_steps)[1], torch.outer(torch.arange(8.0), torch.ones(16)), atol=1e-5)
        True
    """

    name = "powersgd"
    granularity: Literal["tensor", "bucket"] = "tensor"
    collectives = frozenset({"all_reduce"})
    lossy = True
    fields = MappingProxyType({"residual": "local", "q": "shared"})
    memory_order_fields = frozenset({"residual"})

    def run(self, bucket: Bucket, ctx: StepContext) -> Stages:
        steps = Steps(self, self._space(bucket.layout, bucket), bucket, ctx)

        steps.recall_q()
        steps.project()  # P = D Q
        yield AllReduce(steps.p.flat)

        steps.p.orthonormalise(epsilon=self.epsilon)
        steps.project_back()  # Q_i = D^T P
        own = steps.sent.flat if self.error_feedback and self.residual == "local" else None
        yield AllReduce(steps.q.flat, sent=own)

        if self.warm_start:
            steps.remember_q()
        with exact_products(bucket.device):
            steps.decode()  # G = P Q^T, e = D - P Q_i^T

    # -- what is compressed

    def phase(self, step: int) -> Hashable:
        return step >= self.start_iter

    def route(self, param: ParamLayout, step: int) -> str | None:
        if step < self.start_iter:
            return f"warm-up until step {self.start_iter}"
        if len(param.shape) < 2:
            return "0-d" if not param.shape else "1-D"
        return self.not_worth(self._stack([param], *param.matrix_shape))

    def not_worth(self, stack: Stack) -> str | None:
        """Why a matrix is too small to be compressed, or ``None``."""
        n, m, rank = stack.rows, stack.cols, stack.rank
        if (n + m) * rank * self.min_compression_rate < n * m:
            return None
        return f"({n}+{m})*{rank}*{self.min_compression_rate:g} >= {n}*{m}"

    def stacks(self, layout: BucketLayout) -> list[Stack]:
        """The matrices of a bucket: one stack per parameter; where launching kernels is what costs, small matrices of one
        shape are together. On a CPU nothing is launched, and gathering them would be one more pass over memory.
        """
        together: dict[object, list[ParamLayout]] = {}
        for p in layout.params:
            together.setdefault(p.matrix_shape if batches(layout.device, p.numel) else p.name, []).append(p)
        return [self._stack(same, *same[0].matrix_shape, count=len(same)) for same in together.values()]

    def _stack(self, params: Sequence[ParamLayout], rows: int, cols: int, count: int = 1) -> Stack:
        return Stack(tuple(params), count, rows, cols, min(rows, cols, self.rank))

    @per_layout
    def _space(self, layout: BucketLayout, like: Bucket) -> Workspace:
        return Workspace(self.stacks(layout), like.dtype, like.device)


class BatchedPowerSGD(PowerSGD):
    """:class:`PowerSGD` of a whole bucket as one near-square matrix: two products a bucket instead of two a parameter.

    The bucket's gradients, biases too, are laid one after another into a matrix of ``ceil(sqrt(numel))`` columns, the
    end padded with zeros. The matrix has no meaning, so the approximation is poorer, and **the result depends on the
    buckets** (``bucket_cap_mb``). The residual is kept per parameter, Q under the name of the bucket's first. A bucket
    too small for ``min_compression_rate`` is averaged plainly.

    Example:
        >>> from commhooks.reduction import StepContext
        >>> stages = BatchedPowerSGD(rank=2).plan(BucketLayout.of_shapes({"w": (30, 30), "b": (30,)}), StepContext())
        >>> [requests[0].numel for requests in stages]  # 930 elements as (30, 31)
        [60, 62]
    """

    name = "batched_powersgd"
    granularity = "bucket"

    def route(self, param: ParamLayout, step: int) -> str | None:
        return f"warm-up until step {self.start_iter}" if step < self.start_iter else None

    def stacks(self, layout: BucketLayout) -> list[Stack]:
        cols = math.isqrt(layout.size - 1) + 1
        return [self._stack(layout.params, -(-layout.size // cols), cols)]

    def run(self, bucket: Bucket, ctx: StepContext) -> Stages:
        (stack,) = self.stacks(bucket.layout)
        return Plain().run(bucket, ctx) if self.not_worth(stack) else super().run(bucket, ctx)
