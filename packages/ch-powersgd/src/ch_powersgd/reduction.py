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

import torch

from ch_powersgd.algebra import Factor, Stack, gaussian
from ch_powersgd.validation import at_least, flag, one_of, positive, whole
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
    do not depend on which bucket a parameter is in.

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
        shapes = self._shapes_of(bucket.layout)
        work = Work(self, shapes, bucket, ctx)
        p, q = work.flat("p", shapes.p.numel), work.flat("q", shapes.q.numel)
        sent = work.flat("q sent", shapes.q.numel)
        ps, qs, own = shapes.p.views(p), shapes.q.views(q), shapes.q.views(sent)

        work.recall_q(qs)
        shapes.q.orthonormalise(q, sent, noise=work.noise())
        matrices = [work.project(number, P, Q) for number, (P, Q) in enumerate(zip(ps, qs, strict=True))]
        yield AllReduce(p)

        shapes.p.orthonormalise(p, work.flat("p spare", shapes.p.numel), epsilon=self.epsilon)
        for D, P, Q in zip(matrices, ps, qs, strict=True):
            torch.bmm(P, D, out=Q)  # Q_i = D^T P
        yield AllReduce(q, sent=sent if self.error_feedback and self.residual == "local" else None)

        if self.warm_start:
            work.remember_q(qs)
        for number, (D, P, Q, Q_i) in enumerate(zip(matrices, ps, qs, own, strict=True)):
            work.decode(number, D, P, Q, Q_i)

    def _shapes_of(self, layout: BucketLayout) -> "Shapes":
        if layout not in self._shapes:
            self._shapes[layout] = Shapes(self.stacks(layout))
        return self._shapes[layout]


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
        (stack,) = self._shapes_of(bucket.layout).stacks
        return plain(bucket) if self.not_worth(stack.rows, stack.cols) else super().run(bucket, ctx)


_BLOCK = 1 << 17  # elements of a matrix that are added, multiplied and decoded at once


def _ceil_sqrt(n: int) -> int:
    root = int(n**0.5)
    while root * root < n:
        root += 1
    return root


class Shapes:
    """A bucket layout as PowerSGD sees it: its stacks, and where their factors lie."""

    def __init__(self, stacks: list[Stack]) -> None:
        self.stacks = stacks
        self.p = Factor([(s.count, s.rank, s.rows) for s in stacks])
        self.q = Factor([(s.count, s.rank, s.cols) for s in stacks])
        self.largest = max(s.numel for s in stacks)
        self.widest = max(s.cols for s in stacks)
        self.noise: dict[tuple[torch.device, torch.dtype], torch.Tensor] = {}


class Work:
    """One bucket of one step: brings gradients and state to the algorithm, and its results back."""

    def __init__(self, config: PowerSGD, shapes: Shapes, bucket: Bucket, ctx: StepContext) -> None:
        self.config, self.shapes, self.bucket, self.ctx = config, shapes, bucket, ctx
        self.dtype = torch.promote_types(bucket.dtype, torch.float32)  # of algebra and residual

    def flat(self, name: str, numel: int) -> torch.Tensor:
        return self.ctx.scratch(name, (numel,), self.dtype, self.bucket.device)

    # -- Q

    def recall_q(self, qs: list[torch.Tensor]) -> None:
        """Fill Q from the last step; what there is none for (or of another rank) is drawn."""
        config, step = self.config, 0 if self.config.warm_start else self.ctx.step
        targets, sources = [], []
        for stack, q in zip(self.shapes.stacks, qs, strict=True):
            for key, target in zip(stack.keys, q.unbind(0), strict=True):
                found = self.ctx.read(key, "q") if config.warm_start else None
                if found is None or found.shape != target.shape:
                    found = gaussian(config.seed, key, step, (stack.rank, stack.cols), target.device)
                targets.append(target)
                sources.append(found)
        torch._foreach_copy_(targets, sources)

    def remember_q(self, qs: list[torch.Tensor]) -> None:
        targets, sources = [], []
        for stack, q in zip(self.shapes.stacks, qs, strict=True):
            for key, source in zip(stack.keys, q.unbind(0), strict=True):
                targets.append(self.ctx.stage(key, "q", source.shape, self.dtype, self.bucket.device))
                sources.append(source)
        torch._foreach_copy_(targets, sources)

    def noise(self) -> torch.Tensor:
        """Columns for where Q has none, laid out like Q: the same at every step, so made once."""
        place = (self.bucket.device, self.dtype)
        if place not in self.shapes.noise:
            noise = torch.empty(self.shapes.q.numel, dtype=self.dtype, device=self.bucket.device)
            for stack, view in zip(self.shapes.stacks, self.shapes.q.views(noise), strict=True):
                for key, target in zip(stack.keys, view.unbind(0), strict=True):
                    target.copy_(gaussian(self.config.seed, key, -1, (stack.rank, stack.cols), target.device))
            self.shapes.noise[place] = noise
        return self.shapes.noise[place]

    # -- D, G and e

    def project(self, number: int, p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        """``D = G + e`` of a stack, ``(count, rows, cols)``, and ``P = D Q``. ``D`` takes the place of ``G`` in the
        bucket where it can: a block of rows is added to and multiplied while it is in the cache.
        """
        stack = self.shapes.stacks[number]
        if not self._in_place(stack):
            d = self._gathered(number)
            torch.bmm(q, d.mT, out=p)
            return d
        d = self.bucket.matrix(stack.params[0])
        found = self.ctx.read(stack.params[0].name, "residual") if self.config.error_feedback else None
        if found is None or found.shape != d.shape:
            torch.mm(q[0], d.t(), out=p[0])
        else:
            n = self._block(stack)
            for rows, kept, out in zip(d.split(n), found.split(n), p[0].split(n, 1), strict=True):
                rows.add_(kept)
                torch.mm(q[0], rows.t(), out=out)
        return d.unsqueeze(0)

    def decode(self, number: int, d: torch.Tensor, p: torch.Tensor, q: torch.Tensor, q_i: torch.Tensor) -> None:
        """``G = P Q^T`` into the bucket, and ``e = D - P Q_i^T``, or D minus what was decoded."""
        stack = self.shapes.stacks[number]
        if not self._in_place(stack):
            self._multiply_out(number, p, q)
            if self.config.error_feedback:
                self._keep_residual(number, d, p, q_i)
            return
        gradient, left = d[0], p[0].t()
        if not self.config.error_feedback:
            torch.mm(left, q[0], out=gradient)
            return
        n, got = self._block(stack), q_i[0] if self.config.residual == "local" else q[0]
        sent = self._spare_block(stack)
        blocks = zip(gradient.split(n), left.split(n), self._staged(stack.params[0]).split(n), strict=True)
        for rows, factor, kept in blocks:
            torch.sub(rows, torch.mm(factor, got, out=sent[: len(rows)]), out=kept)
            torch.mm(factor, q[0], out=rows)

    def _in_place(self, stack: Stack) -> bool:
        return stack.direct and self.bucket.dtype == self.dtype

    def _block(self, stack: Stack) -> int:
        """Rows to be worked on at once: on a CPU as many as stay in a core's cache."""
        if self.bucket.device.type != "cpu":
            return stack.rows
        return max(1, min(stack.rows, _BLOCK // stack.cols))

    def _spare_block(self, stack: Stack) -> torch.Tensor:
        on_cpu, shapes = self.bucket.device.type == "cpu", self.shapes
        whole = self.flat("block", min(shapes.largest, max(_BLOCK, shapes.widest)) if on_cpu else shapes.largest)
        n = self._block(stack)
        return whole[: n * stack.cols].view(n, stack.cols)

    def _gathered(self, number: int) -> torch.Tensor:
        """``D = G + e`` of a stack, ``(count, rows, cols)``: in the staged residual or in scratch."""
        stack, feedback = self.shapes.stacks[number], self.config.error_feedback
        first = stack.params[0]
        if stack.direct and feedback:
            home = self._staged(first)
        else:
            home = self.flat(f"d {number}", stack.numel)
            home[stack.filled :].zero_()
        for param, target in _pieces(stack, home):
            found = self.ctx.read(param.name, "residual") if feedback else None
            if found is not None and found.shape == target.shape:
                torch.add(self.bucket.matrix(param), found, out=target)
            else:
                target.copy_(self.bucket.matrix(param))
        return home.view(stack.count, stack.rows, stack.cols)

    def _multiply_out(self, number: int, p: torch.Tensor, q: torch.Tensor) -> None:
        stack = self.shapes.stacks[number]
        flat = self.flat("decoded", self.shapes.largest)[: stack.numel]
        torch.bmm(p.mT, q, out=flat.view(stack.count, stack.rows, stack.cols))
        for param, piece in _pieces(stack, flat):
            self.bucket.matrix(param).copy_(piece)

    def _keep_residual(self, number: int, d: torch.Tensor, p: torch.Tensor, q: torch.Tensor) -> None:
        stack = self.shapes.stacks[number]
        if self.config.residual == "local":
            d.baddbmm_(p.mT, q, alpha=-1)
            if stack.direct:
                return
        for param, piece in _pieces(stack, d.view(-1)):
            kept = piece if stack.direct else self._staged(param)
            if self.config.residual == "averaged":
                torch.sub(piece, self.bucket.matrix(param), out=kept)
            else:
                kept.copy_(piece)

    def _staged(self, param: ParamLayout) -> torch.Tensor:
        return self.ctx.stage(param.name, "residual", param.matrix_shape, self.dtype, self.bucket.device)


def _pieces(stack: Stack, home: torch.Tensor) -> list[tuple[ParamLayout, torch.Tensor]]:
    """A stack's elements by parameter, each ``(outer, inner)``."""
    if stack.direct:
        return [(stack.params[0], home.view(stack.rows, stack.cols))]
    parts = torch.split_with_sizes(home[: stack.filled], [p.numel for p in stack.params])
    return [(p, part.view(p.matrix_shape)) for p, part in zip(stack.params, parts, strict=True)]
