"""The steps of PowerSGD on one bucket, in the order of the paper.

The products are what PowerSGD costs, and they move far more memory than they calculate: what is done to a block of rows
is done at once. The shapes in the comments are of one matrix; built in scratch, ``count`` of them are worked on at once.
"""

from functools import partial

import torch

from ch_powersgd.config import PowerSGDConfig
from ch_powersgd.workspace import Matrix, Stack, Workspace, to_cache
from commhooks import Bucket, ParamLayout, StepContext
from commhooks.numerics import seeded_normals


class Steps:
    """One bucket of one step.

    Attributes:
        p, q, sent: all P's, all Q's, and the Q's as this rank sent them.
    """

    def __init__(self, config: PowerSGDConfig, space: Workspace, bucket: Bucket, ctx: StepContext) -> None:
        self.config, self.space, self.bucket, self.ctx = config, space, bucket, ctx
        self._stage = partial(ctx.stage, dtype=space.dtype, device=space.device)
        self._scratch = partial(ctx.scratch, dtype=space.dtype, device=space.device)
        self._factors = self.p, self.q, self.sent = space.factors(self._scratch)
        self._matrices: list[Matrix] = []
        self._averaged = config.residual == "averaged"

    def recall_q(self) -> None:
        """Q of the last step; what there is none for (or of another rank) is drawn. Columns that Q has lost are replaced,
        so that the next gradient can fill them.
        """
        warm, seed, shapes = self.config.warm_start, self.config.seed, self.space.shapes
        found = {key: self.ctx.read(key, "q", shape) if warm else None for key, shape in shapes.items()}
        missing = {key: shapes[key] for key, q in found.items() if q is None}
        drawn = seeded_normals(f"{seed}/{0 if warm else self.ctx.step}", missing, self.space.device, unit=True)
        torch._foreach_copy_(self.q.matrices, [drawn[key] if q is None else q for key, q in found.items()])
        self.q.orthonormalise(self.space.noise(seed))

    def project(self) -> None:
        """``D = G + e`` and ``P = D Q``. Where it can, D takes the place of G in the bucket."""
        in_place = self.space.in_place(self.bucket, self._factors)
        for number, stack in enumerate(self.space.stacks):
            matrix = in_place.get(number)
            e = self._residual(stack.params[0]) if matrix is not None else None
            matrix = matrix or Matrix(stack, self._gathered(number, stack), self._factors, number)
            for (d, left), rest in zip(matrix.blocks, matrix.rows_of(e), strict=True):
                if rest is not None:
                    d.add_(rest)
                else:
                    to_cache(d)
                matrix.product(d, matrix.right, out=left)  # (n, cols) (cols, rank)
            self._matrices.append(matrix)

    def _gathered(self, number: int, stack: Stack) -> torch.Tensor:
        """``D = G + e``, built where the residual is staged if that is one parameter's, else in scratch."""
        residuals = [self._residual(param) for param in stack.params]
        staged = stack.direct and self.config.error_feedback
        home = self._new_residual(stack.params[0]) if staged else self._scratch(f"d {number}", (stack.numel,))
        for (param, d), e in zip(stack.pieces(home), residuals, strict=True):
            if e is not None:
                torch.add(self.bucket.matrix(param), e, out=d)
            else:
                d.copy_(self.bucket.matrix(param))
        home.view(-1)[sum(p.numel for p in stack.params) :].zero_()  # what the padding holds would reach P
        return home.view(stack.rows, stack.cols) if stack.count == 1 else home.view(-1, stack.rows, stack.cols)

    def project_back(self) -> None:
        """``Q_i = D^T P``."""
        for matrix in self._matrices:
            matrix.project_back()

    def remember_q(self) -> None:
        """Stage Q for the next step."""
        staged = [self._stage(key, "q", shape) for key, shape in self.space.shapes.items()]
        torch._foreach_copy_(staged, self.q.matrices)

    def decode(self) -> None:
        """``P Q^T`` takes the place of G; ``e = D - P Q_i^T``, or D minus the average, is staged."""
        for matrix in self._matrices:
            got = matrix.q if self._averaged else matrix.sent
            if not matrix.in_place:
                self._decode_scratch(matrix, got)
                continue
            e = self._new_residual(matrix.stack.params[0]) if self.config.error_feedback else None
            for (d, left), rest in zip(matrix.blocks, matrix.rows_of(e), strict=True):
                if rest is not None:
                    matrix.less_product(d, left, got, out=rest)  # (n, cols) - (n, rank) (rank, cols)
                matrix.outer_product(left, matrix.q, out=d)  # D is gone

    def _decode_scratch(self, matrix: Matrix, got: torch.Tensor) -> None:
        """Of a matrix that was built in scratch: the average takes D's place there once the residuals have been staged.
        It has a place of its own where D is still needed, or is where the residual is staged.
        """
        stack, d, kept = matrix.stack, matrix.d, self.config.error_feedback
        left = matrix.p.mT
        if kept and not self._averaged:
            matrix.less_product(d, left, got, out=d)
            if not stack.direct:
                for param, e in stack.pieces(d):
                    self._new_residual(param).copy_(e)
        g = d
        if kept and (stack.direct or self._averaged):
            largest = self.space.largest
            g = self._scratch(f"decoded {largest}", (largest,), brief=True)[: stack.numel].view(d.shape)
        matrix.outer_product(left, matrix.q, out=g)
        for param, average in stack.pieces(g):
            self.bucket.matrix(param).copy_(average)
        if kept and self._averaged:  # the average is known when it has been rounded
            for param, one in stack.pieces(d):
                torch.sub(one, self.bucket.matrix(param), out=self._new_residual(param))

    def _residual(self, param: ParamLayout) -> torch.Tensor | None:
        return self.ctx.read(param.name, "residual", param.matrix_shape) if self.config.error_feedback else None

    def _new_residual(self, param: ParamLayout) -> torch.Tensor:
        return self._stage(param.name, "residual", param.matrix_shape)
