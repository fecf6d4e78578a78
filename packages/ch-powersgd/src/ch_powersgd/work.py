"""PowerSGD's work on one bucket: gradients and state come in, P and Q go out, averages and residuals come back.

The products are what PowerSGD costs, and they move far more memory than they calculate. So a matrix that is one
parameter in the bucket is worked on where it lies and, on a CPU, in blocks of rows that stay in a core's cache from
one pass to the next. Matrices gathered from several parameters, or narrower than fp32, are built in scratch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from ch_powersgd.algebra import Factor, Stack, gaussian
from commhooks.bucket import Bucket, ParamLayout
from commhooks.reduction import StepContext

if TYPE_CHECKING:
    from ch_powersgd.reduction import PowerSGD

_BLOCK = 1 << 16  # elements of a matrix that are added, multiplied and decoded at once


class Shapes:
    """A bucket as PowerSGD sees it: its stacks, where their factors lie, and the blocks they are worked on in.

    Attributes:
        dtype: of algebra and state.
        blocks: per stack the rows of each block, or ``None`` for what is built in scratch.
        largest: elements of the largest stack.
    """

    def __init__(self, stacks: list[Stack], dtype: torch.dtype, device: torch.device) -> None:
        self.stacks = stacks
        self.dtype = torch.promote_types(dtype, torch.float32)
        self.p = Factor([(s.count, s.rank, s.rows) for s in stacks])
        self.q = Factor([(s.count, s.rank, s.cols) for s in stacks])
        in_place, on_cpu = dtype == self.dtype, device.type == "cpu"
        self.blocks = [_blocks(s, on_cpu) if in_place and s.direct else None for s in stacks]
        self.largest = max(s.numel for s in stacks)
        self._device = device
        self._noise: list[list[torch.Tensor]] | None = None
        self._factors: Factors | None = None

    def factors(self, p: torch.Tensor, q: torch.Tensor, sent: torch.Tensor) -> "Factors":
        """The views of these flat tensors, which are the same at every step: made once."""
        found = self._factors
        if found is None or found.of[0] is not p or found.of[1] is not q or found.of[2] is not sent:
            found = self._factors = Factors(self, p, q, sent)
        return found

    def noise(self, seed: int) -> list[list[torch.Tensor]]:
        """Columns for where Q has none, by rank as in :attr:`Factors.q_columns`: the same at every step, so made once."""
        if self._noise is None:
            noise = torch.empty(self.q.numel, dtype=self.dtype, device=self._device)
            for stack, view in zip(self.stacks, self.q.views(noise), strict=True):
                for key, target in zip(stack.keys, view.unbind(0), strict=True):
                    target.copy_(gaussian(seed, key, -1, (stack.rank, stack.cols), self._device))
            self._noise = self.q.by_rank(noise)
        return self._noise


def _blocks(stack: Stack, on_cpu: bool) -> list[int]:
    """Rows of each block of a matrix, as even as can be."""
    block = 2 * _BLOCK if stack.rank == 1 else _BLOCK  # vectors are multiplied faster: fewer calls
    wanted = round(stack.rows * stack.cols / block) if on_cpu else 1
    n = -(-stack.rows // min(max(wanted, 1), stack.rows))
    return [min(n, stack.rows - start) for start in range(0, stack.rows, n)]


@dataclass(slots=True)
class Matrix:
    """A matrix that is worked on where it lies in the bucket, its factors, and the views that this takes.

    Attributes:
        d: ``(rows, cols)``.
        parts: its blocks of rows.
        p, q, sent: ``(rank, rows)``, and twice ``(rank, cols)``.
        right: Q as columns, ``(cols, rank)``.
        left: per block the part of P that its rows give, ``(n, rank)``.
    """

    d: torch.Tensor
    parts: Sequence[torch.Tensor]
    p: torch.Tensor
    q: torch.Tensor
    sent: torch.Tensor
    right: torch.Tensor
    left: Sequence[torch.Tensor]
    _rows: list[tuple[torch.Tensor, Sequence[torch.Tensor]]] = field(default_factory=list)

    def rows(self, residual: torch.Tensor) -> Sequence[torch.Tensor]:
        """A residual in blocks. There are two that take turns: each is cut up once."""
        for tensor, rows in self._rows:
            if tensor is residual:
                return rows
        rows = residual.split_with_sizes([len(part) for part in self.parts])
        self._rows = [*self._rows[-1:], (residual, rows)]
        return rows


class Factors:
    """P, Q and the sent Q of a bucket, cut up.

    Attributes:
        p, q, sent: per stack ``(count, rank, length)``.
        columns: of every matrix its Q, ``(rank, cols)``, with its key and stack.
        p_columns, q_columns: to be made orthonormal, by rank.
    """

    def __init__(self, shapes: Shapes, p: torch.Tensor, q: torch.Tensor, sent: torch.Tensor) -> None:
        self.of = (p, q, sent)
        self.p, self.q, self.sent = shapes.p.views(p), shapes.q.views(q), shapes.q.views(sent)
        self.p_columns, self.q_columns = shapes.p.columns(p), shapes.q.columns(q)
        self.columns = [
            (key, stack, column)
            for stack, part in zip(shapes.stacks, self.q, strict=True)
            for key, column in zip(stack.keys, part.unbind(0), strict=True)
        ]

    def matrices(self, bucket: Bucket, shapes: Shapes) -> list[Matrix | None]:
        """Per stack the matrix in the bucket, ``None`` for what is built in scratch."""
        found: list[Matrix | None] = []
        for stack, blocks, p, q, sent in zip(shapes.stacks, shapes.blocks, self.p, self.q, self.sent, strict=True):
            if blocks is None:
                found.append(None)
                continue
            d = bucket.matrix(stack.params[0])
            left = p[0].t().split_with_sizes(blocks)
            found.append(Matrix(d, d.split_with_sizes(blocks), p[0], q[0], sent[0], q[0].t(), left))
        return found


class Work:
    """One bucket of one step.

    Attributes:
        p, q, sent: flat tensors of all P's, of all Q's, and of the Q's as this rank sent them.
    """

    def __init__(self, config: "PowerSGD", shapes: Shapes, bucket: Bucket, ctx: StepContext) -> None:
        self.config, self.shapes, self.bucket, self.ctx = config, shapes, bucket, ctx
        self.p, self.q = self.flat("p", shapes.p.numel), self.flat("q", shapes.q.numel)
        self.sent = self.flat("q sent", shapes.q.numel)
        self.factors = shapes.factors(self.p, self.q, self.sent)
        self._matrices = bucket.once(shapes, lambda: self.factors.matrices(bucket, shapes), self.factors)
        self._d: dict[int, torch.Tensor] = {}  # (count, rows, cols), of every stack that is built in scratch

    def flat(self, name: str, numel: int) -> torch.Tensor:
        """Scratch for ``numel`` elements."""
        return self.ctx.scratch(name, (numel,), self.shapes.dtype, self.bucket.device)

    # -- Q

    def recall_q(self) -> None:
        """Fill Q from the last step; what there is none for (or of another rank) is drawn."""
        warm, seed = self.config.warm_start, self.config.seed
        sources = []
        for key, stack, column in self.factors.columns:
            found = self.ctx.read(key, "q") if warm else None
            if found is None or found.shape != column.shape:
                step = 0 if warm else self.ctx.step
                found = gaussian(seed, key, step, (stack.rank, stack.cols), column.device)
            sources.append(found)
        torch._foreach_copy_([column for _, _, column in self.factors.columns], sources)

    def remember_q(self) -> None:
        """Stage Q for the next step."""
        columns, dtype, device = self.factors.columns, self.shapes.dtype, self.bucket.device
        targets = [self.ctx.stage(key, "q", column.shape, dtype, device) for key, _, column in columns]
        torch._foreach_copy_(targets, [column for _, _, column in columns])

    def orthonormalise_q(self) -> None:
        """Columns that Q has lost are replaced, so that the next gradient can fill them."""
        for columns, fresh in zip(self.factors.q_columns, self.shapes.noise(self.config.seed), strict=True):
            columns.orthonormalise(fresh)

    def orthonormalise_p(self, epsilon: float) -> None:
        """Columns that P lacks stay zero: nothing is sent for them."""
        for columns in self.factors.p_columns:
            columns.orthonormalise(epsilon=epsilon)

    # -- P and Q_i

    def project(self) -> None:
        """``D = G + e`` and ``P = D Q`` of every stack. Where it can, D takes the place of G in the bucket."""
        for number, matrix in enumerate(self._matrices):
            if matrix is not None:
                self._project_in_place(number, matrix)
                continue
            d = self._d[number] = self._gathered(number)
            torch.bmm(self.factors.q[number], d.mT, out=self.factors.p[number])

    def project_back(self) -> None:
        """``Q_i = D^T P`` of every stack."""
        for number, matrix in enumerate(self._matrices):
            if matrix is not None:
                torch.mm(matrix.p, matrix.d, out=matrix.q)
            else:
                torch.bmm(self.factors.p[number], self._d[number], out=self.factors.q[number])

    def _project_in_place(self, number: int, matrix: Matrix) -> None:
        kept = self._owed(self.shapes.stacks[number].params[0])
        owed = matrix.rows(kept) if kept is not None else matrix.parts
        for rows, residual, left in zip(matrix.parts, owed, matrix.left, strict=True):
            if kept is not None:
                rows.add_(residual)
            torch.mm(rows, matrix.right, out=left)

    # -- G and e

    def decode(self) -> None:
        """``G = P Q^T`` into the bucket, and ``e = D - P Q_i^T``, or D minus what was decoded, staged."""
        for number, matrix in enumerate(self._matrices):
            if matrix is not None:
                self._decode_in_place(number, matrix)
                continue
            self._multiply_out(number)
            if self.config.error_feedback:
                self._keep_residual(number)

    def _decode_in_place(self, number: int, matrix: Matrix) -> None:
        stack, q = self.shapes.stacks[number], matrix.q
        if not self.config.error_feedback:
            torch.mm(matrix.p.t(), q, out=matrix.d)
            return
        got = q if self._averaged else matrix.sent
        staged = matrix.rows(self._staged(stack.params[0]))
        for rows, left, kept in zip(matrix.parts, matrix.left, staged, strict=True):
            if stack.rank == 1:
                torch.addcmul(rows, left, got, value=-1, out=kept)
                torch.mul(left, q, out=rows)
            else:
                torch.addmm(rows, left, got, alpha=-1, out=kept)
                torch.mm(left, q, out=rows)

    # -- what does not lie in the bucket as a matrix

    def _gathered(self, number: int) -> torch.Tensor:
        """``D = G + e`` of a stack, ``(count, rows, cols)``: in the staged residual or in scratch."""
        stack = self.shapes.stacks[number]
        if stack.direct and self.config.error_feedback:
            home = self._staged(stack.params[0])
        else:
            home = self.flat(f"d {number}", stack.numel)
            home[stack.filled :].zero_()
        for param, target in _pieces(stack, home):
            found = self._owed(param)
            if found is not None:
                torch.add(self.bucket.matrix(param), found, out=target)
            else:
                target.copy_(self.bucket.matrix(param))
        return home.view(stack.count, stack.rows, stack.cols)

    def _multiply_out(self, number: int) -> None:
        stack = self.shapes.stacks[number]
        flat = self.flat("decoded", self.shapes.largest)[: stack.numel]
        p, q = self.factors.p[number], self.factors.q[number]
        torch.bmm(p.mT, q, out=flat.view(stack.count, stack.rows, stack.cols))
        for param, piece in _pieces(stack, flat):
            self.bucket.matrix(param).copy_(piece)

    def _keep_residual(self, number: int) -> None:
        stack, d = self.shapes.stacks[number], self._d[number]
        if not self._averaged:
            d.baddbmm_(self.factors.p[number].mT, self.factors.sent[number], alpha=-1)
            if stack.direct:
                return
        for param, piece in _pieces(stack, d.view(-1)):
            kept = piece if stack.direct else self._staged(param)
            if self._averaged:
                torch.sub(piece, self.bucket.matrix(param), out=kept)
            else:
                kept.copy_(piece)

    @property
    def _averaged(self) -> bool:
        return self.config.residual == "averaged"

    def _owed(self, param: ParamLayout) -> torch.Tensor | None:
        """The residual of the last step, if there is one and it fits."""
        found = self.ctx.read(param.name, "residual") if self.config.error_feedback else None
        return found if found is not None and found.shape == param.matrix_shape else None

    def _staged(self, param: ParamLayout) -> torch.Tensor:
        return self.ctx.stage(param.name, "residual", param.matrix_shape, self.shapes.dtype, self.bucket.device)


def _pieces(stack: Stack, home: torch.Tensor) -> list[tuple[ParamLayout, torch.Tensor]]:
    """A stack's elements by parameter, each ``(outer, inner)``."""
    if stack.direct:
        return [(stack.params[0], home.view(stack.rows, stack.cols))]
    parts = torch.split_with_sizes(home[: stack.filled], [p.numel for p in stack.params])
    return [(p, part.view(p.matrix_shape)) for p, part in zip(stack.params, parts, strict=True)]
