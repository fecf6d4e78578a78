"""PowerSGD: gradients as products of two thin matrices (Vogels, Karimireddy, Jaggi, NeurIPS 2019, arXiv:1905.13727).

Algorithm 1 of the paper, for every gradient matrix G ``(rows, cols)`` with residual e and the previous step's Q::

    D   = G + e                  error feedback
    P   = D orth(Q)              (rows, rank), averaged over all ranks
    Q_i = D^T orth(P)            (cols, rank), averaged over all ranks to Q
    G  <- orth(P) Q^T            decompressed average, equal on all ranks
    e  <- D - orth(P) Q_i^T      new residual of this rank

Each step sends two messages: one tensor of all P's, then one of all Q's. Uncompressed parameters travel with the P's.

Two details differ from the paper. The algorithm orthonormalises Q before it multiplies, so P has the unit of the
gradient and survives a 16-bit wire. Each rank subtracts its own Q_i after rounding on the wire, so input equals sent
plus residual exactly. ``residual="averaged"`` subtracts the average instead, as PyTorch's hook does.
"""

import math
from collections.abc import Hashable, Sequence
from functools import partial
from types import MappingProxyType
from typing import Literal

import torch

from ch_core import exact_products, seeded_normals
from ch_powersgd.config import PowerSGDConfig
from ch_powersgd.workspace import Matrix, Stack, Workspace, load_into_cache, prefers_batches
from commhooks import AllReduce, Bucket, BucketLayout, ParamLayout, Plain, Reduction, Stages, StepContext, per_layout


class PowerSGD(PowerSGDConfig, Reduction):
    """Rank-``rank`` approximation of each gradient matrix, with error feedback and warm start.

    State per parameter: ``residual`` ``(rows, cols)`` in fp32 (fp64 for fp64 gradients) and ``q`` ``(rank, cols)``. The
    result does not depend on the bucket of a parameter, except for the order of addition on three or more ranks.

    Args:
        rank, start_iter, min_compression_rate, residual, error_feedback, warm_start, epsilon, seed: options in this
            order. :class:`~ch_powersgd.config.PowerSGDConfig` states defaults, limits and meaning.

    Raises:
        HookConfigError: an option is out of range.

    Example:
        >>> import torch
        >>> from ch_core import simulate
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
        step = _BucketStep(self, self._workspace(bucket.layout, bucket), bucket, ctx)

        step.recall_q()
        step.project()  # P = D Q
        yield AllReduce(step.p.flat)

        step.p.orthonormalise(epsilon=self.epsilon)
        step.project_back()  # Q_i = D^T P
        own_q = step.own_q.flat if self.error_feedback and self.residual == "local" else None
        yield AllReduce(step.q.flat, sent=own_q)

        if self.warm_start:
            step.store_q()
        with exact_products(bucket.device):
            step.decode()  # G = P Q^T, e = D - P Q_i^T

    # -- selection of matrices

    def phase(self, step: int) -> Hashable:
        return step >= self.start_iter

    def route(self, param: ParamLayout, step: int) -> str | None:
        if step < self.start_iter:
            return f"warm-up until step {self.start_iter}"
        if len(param.shape) < 2:
            return "0-d" if not param.shape else "1-D"
        return self.why_uncompressed(self._stack([param], *param.matrix_shape))

    def low_rank(self, param: ParamLayout, step: int) -> bool:
        fits = not param.plain_only and self.route(param, step) is None
        return fits and (self.granularity == "bucket" or 2 * self.rank < min(param.matrix_shape))

    def why_uncompressed(self, stack: Stack) -> str | None:
        """Return the reason why a matrix is too small to compress, or None."""
        n, m, rank = stack.rows, stack.cols, stack.rank
        if (n + m) * rank * self.min_compression_rate < n * m:
            return None
        return f"({n}+{m})*{rank}*{self.min_compression_rate:g} >= {n}*{m}"

    def stacks(self, layout: BucketLayout) -> list[Stack]:
        """Return the matrices of a bucket, one stack per parameter.

        On devices with kernel launches, small matrices of equal shape share a stack. On a CPU a shared stack would cost
        one more pass over memory and save nothing.
        """
        together: dict[object, list[ParamLayout]] = {}
        for p in layout.params:
            together.setdefault(p.matrix_shape if prefers_batches(layout.device, p.numel) else p.name, []).append(p)
        return [self._stack(same, *same[0].matrix_shape, count=len(same)) for same in together.values()]

    def _stack(self, params: Sequence[ParamLayout], rows: int, cols: int, count: int = 1) -> Stack:
        return Stack(tuple(params), count, rows, cols, min(rows, cols, self.rank))

    @per_layout
    def _workspace(self, layout: BucketLayout, like: Bucket) -> Workspace:
        return Workspace(self.stacks(layout), like.dtype, like.device)


class BatchedPowerSGD(PowerSGD):
    """:class:`PowerSGD` of a whole bucket as one near-square matrix: two products per bucket instead of per parameter.

    All gradients of the bucket, biases too, fill a matrix of ``ceil(sqrt(numel))`` columns. Zeros pad its end. The
    matrix has no meaning, so the approximation is poorer, and **the result depends on the buckets** (``bucket_cap_mb``).
    State keeps the residual per parameter, and Q under the name of the bucket's first parameter. Buckets below
    ``min_compression_rate`` are averaged uncompressed.

    Example:
        >>> from commhooks import StepContext
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
        return Plain().run(bucket, ctx) if self.why_uncompressed(stack) else super().run(bucket, ctx)


class _BucketStep:
    """The algorithm's lines on one bucket in one step.

    The products move far more memory than they calculate. Each method therefore finishes all work on one block of rows
    before it loads the next block. Shapes in comments are those of one matrix; a stack adds a leading ``count``.

    Attributes:
        p, q: factors of all matrices, local before a collective and averaged after it.
        own_q: Q_i of this rank, as the wire rounded it.
    """

    def __init__(self, config: PowerSGDConfig, workspace: Workspace, bucket: Bucket, ctx: StepContext) -> None:
        self.config, self.workspace, self.bucket, self.ctx = config, workspace, bucket, ctx
        self._write = partial(ctx.write, dtype=workspace.dtype, device=workspace.device)
        self._scratch = partial(ctx.scratch, dtype=workspace.dtype, device=workspace.device)
        self._factors = self.p, self.q, self.own_q = workspace.factors(self._scratch)
        self._matrices: list[Matrix] = []
        self._averaged = config.residual == "averaged"

    def recall_q(self) -> None:
        """Load Q of the previous step, or draw it if there is none or its rank differs.

        Random columns replace columns that Q has lost, so that the next gradient can fill them.
        """
        warm, seed, shapes = self.config.warm_start, self.config.seed, self.workspace.q_shapes
        found = {key: self.ctx.read(key, "q", shape) if warm else None for key, shape in shapes.items()}
        missing = {key: shapes[key] for key, q in found.items() if q is None}
        drawn = seeded_normals(f"{seed}/{0 if warm else self.ctx.step}", missing, self.workspace.device, unit=True)
        torch._foreach_copy_(self.q.matrices, [drawn[key] if q is None else q for key, q in found.items()])
        self.q.orthonormalise(self.workspace.random_columns(seed))

    def project(self) -> None:
        """Compute ``D = G + e`` and ``P = D Q``. D overwrites G in the bucket if shape and dtype allow it."""
        in_place = self.workspace.in_place(self.bucket, self._factors)
        for number, stack in enumerate(self.workspace.stacks):
            matrix = in_place.get(number)
            e = self._residual(stack.params[0]) if matrix is not None else None
            matrix = matrix or Matrix(stack, self._copy_d(number, stack), self._factors, number)
            for (d, p), residual in zip(matrix.blocks, matrix.rows_of(e), strict=True):
                if residual is not None:
                    d.add_(residual)
                else:
                    load_into_cache(d)
                matrix.product(d, matrix.q_columns, out=p)  # (n, cols) (cols, rank)
            self._matrices.append(matrix)

    def _copy_d(self, number: int, stack: Stack) -> torch.Tensor:
        """Return ``D = G + e`` outside the bucket: in the new residual if the stack is one parameter, else in scratch."""
        residuals = [self._residual(param) for param in stack.params]
        separate = stack.is_one_param and self.config.error_feedback
        copy = self._new_residual(stack.params[0]) if separate else self._scratch(f"d {number}", (stack.numel,))
        for (param, d), e in zip(stack.pieces(copy), residuals, strict=True):
            if e is not None:
                torch.add(self.bucket.matrix(param), e, out=d)
            else:
                d.copy_(self.bucket.matrix(param))
        copy.view(-1)[sum(p.numel for p in stack.params) :].zero_()  # otherwise old padding would reach P
        return copy.view(stack.rows, stack.cols) if stack.count == 1 else copy.view(-1, stack.rows, stack.cols)

    def project_back(self) -> None:
        """Compute ``Q_i = D^T P``."""
        for matrix in self._matrices:
            matrix.project_back()

    def store_q(self) -> None:
        """Write Q for the next step."""
        written = [self._write(key, "q", shape) for key, shape in self.workspace.q_shapes.items()]
        torch._foreach_copy_(written, self.q.matrices)

    def decode(self) -> None:
        """Write ``P Q^T`` over G, and write ``e = D - P Q_i^T`` (or D minus the average)."""
        for matrix in self._matrices:
            subtracted = matrix.q if self._averaged else matrix.own_q
            if not matrix.in_place:
                self._decode_copy(matrix, subtracted)
                continue
            e = self._new_residual(matrix.stack.params[0]) if self.config.error_feedback else None
            for (d, p), residual in zip(matrix.blocks, matrix.rows_of(e), strict=True):
                if residual is not None:
                    matrix.less_product(d, p, subtracted, out=residual)  # (n, cols) - (n, rank) (rank, cols)
                matrix.outer_product(p, matrix.q, out=d)  # overwrites D

    def _decode_copy(self, matrix: Matrix, subtracted: torch.Tensor) -> None:
        """Decode a matrix that lies outside the bucket.

        The average overwrites D, unless D is still needed or lies in the new residual.
        """
        stack, d, feedback = matrix.stack, matrix.d, self.config.error_feedback
        p = matrix.p.mT
        if feedback and not self._averaged:
            matrix.less_product(d, p, subtracted, out=d)
            if not stack.is_one_param:
                for param, e in stack.pieces(d):
                    self._keep(param, e)
        g = d
        if feedback and (stack.is_one_param or self._averaged):
            largest = self.workspace.largest
            g = self._scratch(f"decoded {largest}", (largest,), brief=True)[: stack.numel].view(d.shape)
        matrix.outer_product(p, matrix.q, out=g)
        for param, average in stack.pieces(g):
            self.bucket.matrix(param).copy_(average)
        if feedback and self._averaged:  # subtract the average as the bucket's dtype rounded it
            for param, one in stack.pieces(d):
                self._keep(param, one.sub_(self.bucket.matrix(param)))

    def _keep(self, param: ParamLayout, e: torch.Tensor) -> None:
        """Write a residual ``(rows, cols)``. Of a parameter without a gradient it is this rank's share of the error."""
        self._new_residual(param).copy_(e)

    def _residual(self, param: ParamLayout) -> torch.Tensor | None:
        return self.ctx.read(param.name, "residual", param.matrix_shape) if self.config.error_feedback else None

    def _new_residual(self, param: ParamLayout) -> torch.Tensor:
        return self._write(param.name, "residual", param.matrix_shape)
