"""The steps of PowerSGD on one bucket, in the order of the paper: recall Q, project, project back, decode, remember Q.

The products are what PowerSGD costs, and they move far more memory than they calculate: what is done to a block of rows
is done at once. The shapes in the comments are of one matrix; built in scratch, ``count`` of them are worked on at once.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ch_powersgd.config import PowerSGDConfig
from ch_powersgd.orthonormal import gaussians
from ch_powersgd.workspace import Matrix, Stack, Workspace
from commhooks import Bucket, ParamLayout, StepContext


class Steps:
    """One bucket of one step.

    Attributes:
        p, q, sent: flat tensors of all P's, of all Q's, and of the Q's as this rank sent them.
    """

    def __init__(self, config: PowerSGDConfig, space: Workspace, bucket: Bucket, ctx: StepContext) -> None:
        self.config, self.space, self.bucket, self.ctx = config, space, bucket, ctx
        self.p, self.q = self._scratch("p", space.p.numel), self._scratch("q", space.q.numel)
        self.sent = self._scratch("q sent", space.q.numel)
        self._factors = space.factors(self.p, self.q, self.sent)
        self._matrices: list[Matrix] = []
        self._averaged = config.residual == "averaged"

    # -- Q, from step to step

    def recall_q(self) -> None:
        """Fill Q from the last step; what there is none for (or of another rank) is drawn."""
        warm, made = self.config.warm_start, self._factors.matrices_q
        kept = [self.ctx.read(key, "q") if warm else None for key, _, _ in made]
        fits = [found is not None and found.shape == q.shape for found, (_, _, q) in zip(kept, made, strict=True)]
        wanted = [(key, (stack.rank, stack.cols)) for (key, stack, _), fit in zip(made, fits, strict=True) if not fit]
        drawn = iter(gaussians(self.config.seed, wanted, 0 if warm else self.ctx.step, self.bucket.device))
        sources = [q if q is not None and fit else next(drawn) for q, fit in zip(kept, fits, strict=True)]
        torch._foreach_copy_([q for _, _, q in made], sources)

    def orthonormalise_q(self) -> None:
        """Columns that Q has lost are replaced, so that the next gradient can fill them."""
        for columns, fresh in zip(self._factors.q_columns, self.space.noise(self.config.seed), strict=True):
            columns.orthonormalise(fresh)

    def remember_q(self) -> None:
        """Stage Q for the next step."""
        made, dtype, device = self._factors.matrices_q, self.space.dtype, self.bucket.device
        targets = [self.ctx.stage(key, "q", q.shape, dtype, device) for key, _, q in made]
        torch._foreach_copy_(targets, [q for _, _, q in made])

    # -- P and Q_i

    def project(self) -> None:
        """``D = G + e`` and ``P = D Q``. Where it can, D takes the place of G in the bucket."""
        in_place = self.space.in_place(self.bucket, self._factors)
        for number, stack in enumerate(self.space.stacks):
            matrix = in_place.get(number) or self._gathered(number, stack)
            for (d, left), e in zip(matrix.blocks, self._still_to_add(matrix), strict=True):
                if e is not None:
                    d.add_(e)
                matrix.product(d, matrix.right, out=left)  # (n, cols) (cols, rank)
            self._matrices.append(matrix)

    def orthonormalise_p(self) -> None:
        """Columns that P lacks stay zero: nothing is sent for them."""
        for columns in self._factors.p_columns:
            columns.orthonormalise(epsilon=self.config.epsilon)

    def project_back(self) -> None:
        """``Q_i = D^T P``."""
        for matrix in self._matrices:
            matrix.product(matrix.p, matrix.d, out=matrix.q)  # (rank, rows) (rows, cols)

    def _gathered(self, number: int, stack: Stack) -> Matrix:
        """``D = G + e``, built where the residual is staged if that is one parameter's, else in scratch."""
        staged = stack.direct and self.config.error_feedback
        home = self._staged(stack.params[0]) if staged else self._scratch(f"d {number}", stack.numel)
        for param, d in pieces(stack, home):
            e = self._residual(param)
            if e is not None:
                torch.add(self.bucket.matrix(param), e, out=d)
            else:
                d.copy_(self.bucket.matrix(param))
        home.view(-1)[sum(p.numel for p in stack.params) :].zero_()  # what the padding holds would reach P
        d = home.view(-1, stack.rows, stack.cols)
        p, q, sent = self._factors.stacks[number]
        return Matrix(stack, d, p, q, sent, [(d, p.mT)])

    def _still_to_add(self, matrix: Matrix) -> Sequence[torch.Tensor | None]:
        """The residual in blocks, where gathering has not added it."""
        e = self._residual(matrix.stack.params[0]) if matrix.in_place else None
        return matrix.rows_of(e) if e is not None else [None] * len(matrix.blocks)

    # -- G and e

    def decode(self) -> None:
        """``P Q^T`` takes the place of G; ``e = D - P Q_i^T``, or D minus the average, is staged."""
        for matrix in self._matrices:
            got = matrix.q if self._averaged else matrix.sent
            targets = zip(matrix.blocks, self._new_residual(matrix), self._decoded(matrix), strict=True)
            with exact_products(self.bucket.device):
                for (d, left), e, g in targets:
                    if e is not None:
                        matrix.less_product(d, left, got, out=e)  # (n, cols) - (n, rank) (rank, cols)
                    matrix.outer_product(left, matrix.q, out=g)  # D is gone where g is d
            if not matrix.in_place:
                self._scatter(matrix)

    def _new_residual(self, matrix: Matrix) -> Sequence[torch.Tensor | None]:
        if not self.config.error_feedback:
            return [None] * len(matrix.blocks)
        if matrix.in_place:
            return matrix.rows_of(self._staged(matrix.stack.params[0]))
        return [None if self._averaged else matrix.d]  # the average is known when it has been rounded

    def _decoded(self, matrix: Matrix) -> list[torch.Tensor]:
        if matrix.in_place or not self.config.error_feedback:
            return [d for d, _ in matrix.blocks]
        return [self._scratch("decoded", self.space.largest)[: matrix.stack.numel].view(matrix.d.shape)]

    def _scatter(self, matrix: Matrix) -> None:
        """Bring what was worked on in scratch to the bucket and to the residuals."""
        for param, decoded in pieces(matrix.stack, self._decoded(matrix)[0]):
            self.bucket.matrix(param).copy_(decoded)
        for param, d in pieces(matrix.stack, matrix.d) if self.config.error_feedback else ():
            if self._averaged:
                torch.sub(d, self.bucket.matrix(param), out=self._staged(param))
            elif not matrix.stack.direct:
                self._staged(param).copy_(d)

    # -- state

    def _residual(self, param: ParamLayout) -> torch.Tensor | None:
        """The residual of the last step ``(rows, cols)``, if there is one and it fits."""
        found = self.ctx.read(param.name, "residual") if self.config.error_feedback else None
        return found if found is not None and found.shape == param.matrix_shape else None

    def _staged(self, param: ParamLayout) -> torch.Tensor:
        return self.ctx.stage(param.name, "residual", param.matrix_shape, self.space.dtype, self.bucket.device)

    def _scratch(self, name: str, numel: int) -> torch.Tensor:
        return self.ctx.scratch(name, (numel,), self.space.dtype, self.bucket.device)


@contextmanager
def exact_products(device: torch.device) -> Iterator[None]:
    """Products of fp32 in fp32, whatever the user allows elsewhere: in TF32 what is decoded and what is kept back would each
    be off by a thousandth of itself, and what is lost between them would never be sent.
    """
    backends: Any = torch.backends
    backend = backends.cuda.matmul if device.type == "cuda" else backends.mkldnn.matmul
    before = backend.fp32_precision
    if before in ("ieee", "none"):
        yield
        return
    backend.fp32_precision = "ieee"
    try:
        yield
    finally:
        backend.fp32_precision = before


def pieces(stack: Stack, home: torch.Tensor) -> Iterator[tuple[ParamLayout, torch.Tensor]]:
    """A stack's elements by parameter, each ``(rows, cols)`` of its own."""
    flat, offset = home.view(-1), 0
    for p in stack.params:
        yield p, flat[offset : offset + p.numel].view(p.matrix_shape)
        offset += p.numel
