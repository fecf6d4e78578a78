"""PowerSGD: gradients as products of two thin matrices (Vogels, Karimireddy, Jaggi, NeurIPS 2019).

For every gradient matrix G of rank i, with residual e and Q kept from the step before::

    D   = G + e                  what is to be sent
    P   = D orth(Q)              all-reduced (mean)
    Q_i = D^T orth(P)            all-reduced (mean) to Q
    G  <- orth(P) Q^T            the averaged gradient, the same on all ranks
    e  <- D - orth(P) Q_i^T      what this rank did not get across

On the wire: one fp32 tensor of all P's, ``rank * rows`` elements each, and one of all Q's, ``rank * cols`` each; the
parameters that are not compressed travel beside the P's.

Two things differ from the paper's code. Q is orthonormalised before it is used, so that P has the unit of the
gradient and survives a 16-bit wire. The residual is the rank's own, and is counted after rounding on the wire, so
that input = sent + residual holds exactly; ``residual="averaged"`` subtracts what all ranks sent together, as
PyTorch's hook does.
"""

from collections.abc import Hashable
from typing import Any, ClassVar, Literal

from ch_powersgd.algebra import Stack
from ch_powersgd.validation import at_least, flag, one_of, positive, whole
from ch_powersgd.work import Shapes, Work
from commhooks.bucket import Bucket, BucketLayout, ParamLayout
from commhooks.combine import plain
from commhooks.reduction import Reduction, Stages, StepContext
from commhooks.requests import AllReduce


class PowerSGD(Reduction):
    """Rank-``rank`` approximation of each gradient matrix, with error feedback and warm start.

    Args:
        rank: columns of P and Q; capped by the matrix.
        start_iter: committed steps of plain averaging before the first compressed one.
        min_compression_rate: a matrix ``(n, m)`` is compressed if ``(n + m) * rank * rate < n * m``.
        residual: ``"local"`` (what this rank did not send) or ``"averaged"`` (PyTorch's: D minus the average).
        error_feedback: add the residual to the next gradient.
        warm_start: go on from the last Q; without it Q is drawn anew at every step.
        epsilon: added to the length of P's columns before they are normalised, in the unit of the gradient.
        seed: of the first Q, and of what replaces columns that a zero or rank-deficient gradient left empty.
        batch: multiply matrices of one shape in one call. They have to be gathered for it, so it pays only where
            launching kernels is what costs: many small layers on a GPU.

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
    fields: ClassVar[dict[str, Literal["local", "shared"]]] = {"residual": "local", "q": "shared"}

    def __init__(
        self,
        rank: int = 1,
        start_iter: int = 0,
        min_compression_rate: float = 2,
        residual: Literal["local", "averaged"] = "local",
        error_feedback: bool = True,
        warm_start: bool = True,
        epsilon: float = 0.0,
        seed: int = 0,
        batch: bool = False,
    ) -> None:
        self.rank = whole("rank", rank, 1)
        self.start_iter = whole("start_iter", start_iter, 0)
        self.min_compression_rate = positive("min_compression_rate", min_compression_rate)
        self.residual = one_of("residual", residual, ("local", "averaged"))
        self.error_feedback = flag("error_feedback", error_feedback)
        self.warm_start = flag("warm_start", warm_start)
        self.epsilon = at_least("epsilon", epsilon, 0)
        self.seed = whole("seed", seed, 0)
        self.batch = flag("batch", batch)
        self._shapes: dict[BucketLayout, Shapes] = {}

    def config(self) -> dict[str, Any]:
        names = ("rank", "start_iter", "min_compression_rate", "residual", "error_feedback", "warm_start")
        return {name: getattr(self, name) for name in (*names, "epsilon", "seed", "batch")}

    # -- what is compressed

    def phase(self, step: int) -> Hashable:
        return step >= self.start_iter

    def route(self, param: ParamLayout, step: int) -> str | None:
        if step < self.start_iter:
            return f"warm-up until step {self.start_iter}"
        if len(param.shape) < 2:
            return "0-d" if not param.shape else "1-D"
        return self.not_worth(*param.matrix_shape)

    def not_worth(self, n: int, m: int) -> str | None:
        """Why a matrix ``(n, m)`` is too small to be compressed, or ``None``."""
        rank = min(n, m, self.rank)
        if (n + m) * rank * self.min_compression_rate < n * m:
            return None
        return f"({n}+{m})*{rank}*{self.min_compression_rate:g} >= {n}*{m}"

    def stacks(self, layout: BucketLayout) -> list[Stack]:
        """The matrices of a bucket: one per parameter, those of one shape together if ``batch`` is set."""
        together: dict[object, list[ParamLayout]] = {}
        for p in layout.params:
            together.setdefault(p.matrix_shape if self.batch else p.name, []).append(p)
        return [self._stack(tuple(p.name for p in same), same) for same in together.values()]

    def _stack(self, keys: tuple[str, ...], params: list[ParamLayout]) -> Stack:
        rows, cols = params[0].matrix_shape
        return Stack(keys, tuple(params), rows, cols, min(rows, cols, self.rank))

    # -- the algorithm

    def run(self, bucket: Bucket, ctx: StepContext) -> Stages:
        work = Work(self, self._shapes_of(bucket), bucket, ctx)

        work.recall_q()
        work.orthonormalise_q()
        work.project()  # P = D Q
        yield AllReduce(work.p)

        work.orthonormalise_p(self.epsilon)
        work.project_back()  # Q_i = D^T P
        own = work.sent if self.error_feedback and self.residual == "local" else None
        yield AllReduce(work.q, sent=own)

        if self.warm_start:
            work.remember_q()
        work.decode()

    def _shapes_of(self, bucket: Bucket) -> Shapes:
        layout = bucket.layout
        if layout not in self._shapes:
            self._shapes[layout] = Shapes(self.stacks(layout), layout.dtype, layout.device)
        return self._shapes[layout]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_shapes": {}}


class BatchedPowerSGD(PowerSGD):
    """PowerSGD of a whole bucket as one near-square matrix: two products a bucket instead of two a parameter.

    The bucket's gradients, biases too, are laid one after another into a matrix of ``ceil(sqrt(numel))`` columns, the
    end padded with zeros. The matrix has no meaning, so the approximation is poorer than :class:`PowerSGD`'s, and
    **the result depends on the buckets** (``bucket_cap_mb``). The residual is kept per parameter, Q under the name
    of the bucket's first.

    Args:
        rank, start_iter, min_compression_rate, residual, error_feedback, warm_start, epsilon, seed: as for
            :class:`PowerSGD`. A bucket too small for ``min_compression_rate`` is averaged plainly.

    Example:
        >>> from commhooks.reduction import StepContext
        >>> stages = BatchedPowerSGD(rank=2).plan(BucketLayout.of_shapes({"w": (30, 30), "b": (30,)}), StepContext())
        >>> [requests[0].numel for requests in stages]  # 930 elements as (30, 31)
        [60, 62]
    """

    name = "batched_powersgd"
    granularity = "bucket"

    def __init__(
        self,
        rank: int = 1,
        start_iter: int = 0,
        min_compression_rate: float = 2,
        residual: Literal["local", "averaged"] = "local",
        error_feedback: bool = True,
        warm_start: bool = True,
        epsilon: float = 0.0,
        seed: int = 0,
    ) -> None:
        super().__init__(rank, start_iter, min_compression_rate, residual, error_feedback, warm_start, epsilon, seed)

    def config(self) -> dict[str, Any]:
        return {key: value for key, value in super().config().items() if key != "batch"}

    def route(self, param: ParamLayout, step: int) -> str | None:
        return f"warm-up until step {self.start_iter}" if step < self.start_iter else None

    def stacks(self, layout: BucketLayout) -> list[Stack]:
        cols = _ceil_sqrt(layout.size)
        rows = -(-layout.size // cols)
        return [Stack((layout.params[0].name,), layout.params, rows, cols, min(rows, cols, self.rank))]

    def run(self, bucket: Bucket, ctx: StepContext) -> Stages:
        (stack,) = self._shapes_of(bucket).stacks
        return plain(bucket) if self.not_worth(stack.rows, stack.cols) else super().run(bucket, ctx)


def _ceil_sqrt(n: int) -> int:
    root = int(n**0.5)
    while root * root < n:
        root += 1
    return root
