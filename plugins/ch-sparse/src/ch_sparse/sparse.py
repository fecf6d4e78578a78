"""Base of the sparse hooks: exact averaging of small parameters, and the residual."""

from typing import Literal

import torch

from ch_sparse.options import SparseOptions
from commhooks import Bucket, ParamLayout, Reduction, StepContext

FIELD = "residual"
Places = list[tuple[ParamLayout, torch.Tensor]]
"""Each parameter of a bucket with its flat rows of a grid, fp32. Elements beyond the parameter are zero."""


class Sparse(SparseOptions, Reduction):
    """A mean of a few entries of each rank.

    ``p = g + decay * e`` is made sparse, and ``e = p - sent`` is kept (Stich et al. 2018, arXiv:1809.07599).
    """

    density: float
    lossy = True
    memory_order_fields = frozenset({FIELD})
    fields: dict[str, Literal["local", "shared"]]

    def __post_init__(self) -> None:
        super().__post_init__()
        self.fields = {FIELD: "local"} if self.feedback else {}

    def route(self, param: ParamLayout, step: int) -> str | None:
        """Return why a parameter is averaged exactly, or ``None``."""
        if not self.exempt:
            return None
        if len(param.shape) < 2:
            return f"{len(param.shape)}-D"
        least = round(1.0 / self.density)
        return f"fewer than {least} elements" if param.numel < least else None

    def load(self, bucket: Bucket, places: Places, ctx: StepContext) -> None:
        """Fill the parameters' places with ``p = g + decay * e``."""
        for p, place in places:
            place[p.numel :].zero_()
            place[: p.numel].copy_(bucket.matrix(p).view(-1))
            before = ctx.read(p.name, FIELD) if self.feedback else None
            if before is not None:
                place[: p.numel].add_(before.view(-1), alpha=self.decay)

    def keep(self, places: Places, ctx: StepContext, device: torch.device) -> None:
        """Write the parameters' places as the residual of the next step."""
        for p, place in places:
            ctx.write(p.name, FIELD, p.matrix_shape, device=device).view(-1).copy_(place[: p.numel])


def fill(bucket: Bucket, places: Places) -> None:
    """Copy the parameters' places to a bucket."""
    for p, place in places:
        bucket.matrix(p).view(-1).copy_(place[: p.numel])
