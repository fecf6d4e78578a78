"""What the sparse hooks have in common: their options, which parameters are averaged exactly, and the residual."""

from collections.abc import Hashable
from typing import Any, Literal

import torch

from commhooks import Bucket, HookConfigError, ParamLayout, Reduction, StepContext

FIELD = "residual"
Places = list[tuple[ParamLayout, torch.Tensor]]
"""The flat rows of a grid that each parameter of a bucket has, fp32; beyond its elements they are zero."""


class Sparse(Reduction):
    """A mean of a few entries of each rank: ``p = g + decay * e`` is made sparse, ``e = p - what was sent`` is kept.

    Args:
        density: part of the entries that is sent, above 0 and at most 1.
        feedback: keep what was not sent for the next step, in fp32.
        decay: what a step leaves of what was kept; 1 loses nothing.
        start_iter: committed steps that are averaged exactly before.
        exempt: average parameters of fewer than two dimensions, and those of fewer than ``1 / density`` elements, exactly.

    Raises:
        HookConfigError: an option out of its range, or ``decay`` without ``feedback``.
    """

    lossy = True
    memory_order_fields = frozenset({FIELD})
    fields: dict[str, Literal["local", "shared"]]

    def __init__(self, density: float, feedback: bool, decay: float, start_iter: int, exempt: bool) -> None:
        if isinstance(density, bool) or not 0.0 < density <= 1.0:
            raise HookConfigError(f"density={density!r}: expected a part above 0 and at most 1, such as 0.01")
        if isinstance(start_iter, bool) or start_iter < 0:
            raise HookConfigError(f"start_iter={start_iter!r}: expected 0 or a number of steps")
        if not 0.0 < decay <= 1.0:
            raise HookConfigError(f"decay={decay!r}: expected a number above 0 and at most 1")
        if decay != 1.0 and not feedback:
            raise HookConfigError(f"decay={decay!r} without feedback: nothing is kept that could decay; leave it out")
        self.density, self.feedback, self.decay = float(density), bool(feedback), float(decay)
        self.start_iter, self.exempt = start_iter, bool(exempt)
        self.fields = {FIELD: "local"} if feedback else {}

    def config(self) -> dict[str, Any]:
        return {
            "density": self.density,
            "feedback": self.feedback,
            "decay": self.decay,
            "start_iter": self.start_iter,
            "exempt": self.exempt,
        }

    def phase(self, step: int) -> Hashable:
        return step < self.start_iter

    def route(self, param: ParamLayout, step: int) -> str | None:
        if step < self.start_iter:
            return f"exact for the first {self.start_iter} steps"
        if not self.exempt:
            return None
        if len(param.shape) < 2:
            return f"{len(param.shape)}-D"
        least = round(1.0 / self.density)
        return f"fewer than {least} elements" if param.numel < least else None

    def load(self, bucket: Bucket, places: Places, ctx: StepContext) -> None:
        """Fill the parameters' places with what a rank has to give: its gradient, and what it kept."""
        for p, place in places:
            place[p.numel :].zero_()
            place[: p.numel].copy_(bucket.matrix(p).view(-1))
            before = ctx.read(p.name, FIELD) if self.feedback else None
            if before is not None:
                place[: p.numel].add_(before.view(-1), alpha=self.decay)

    def keep(self, places: Places, ctx: StepContext, device: torch.device) -> None:
        """Keep what the parameters' places hold for the next step."""
        for p, place in places:
            ctx.stage(p.name, FIELD, p.matrix_shape, device=device).view(-1).copy_(place[: p.numel])


def fill(bucket: Bucket, places: Places) -> None:
    """Copy to a bucket what its parameters' places hold."""
    for p, place in places:
        bucket.matrix(p).view(-1).copy_(place[: p.numel])
