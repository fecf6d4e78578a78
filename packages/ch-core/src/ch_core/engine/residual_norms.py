"""Norms of the residuals of an engine's state."""

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch

from ch_core.engine.engine import Engine
from ch_core.engine.outcome import Progress
from ch_core.engine.stats import as_residual
from ch_core.entries import RESIDUAL


class ResidualNorm(NamedTuple):
    """Norm of a residual on this rank.

    Attributes:
        residual: norm of the residual, without the loss scale and in units of the average.
        total: norm of gradient plus residual in the same units; ``None`` if the gradient is gone.
    """

    residual: float
    total: float | None

    @property
    def relative(self) -> float | None:
        """‖residual‖ / ‖gradient + residual‖, the share of the gradient that was not sent."""
        if self.total is None:
            return None
        return self.residual / self.total if self.total > 0 else 0.0


def residual_norms(engine: Engine) -> dict[str, ResidualNorm]:
    """Return the norm of every parameter's residual after the last finished step, on this rank.

    It leaves out gradients that no longer exist, with FSDP2 all of them in the first call. From then on the engine keeps
    them.
    """
    engine.keep_buckets()
    reduction, state = engine.reduction, engine.state
    step = state.step if engine.outcome.progress is Progress.DECIDED else max(state.step - 1, 0)
    found = {}
    available = {p.name: (bucket, p) for bucket in engine.step.kept for p in bucket.params}
    # A weighted step multiplies gradients before their encoding, and divides the average.
    unit = engine.outcome.weights.divisor if engine.outcome.weights is not None else 1.0
    residuals = {name: entry for (name, field), entry in state.draft.newest().items() if field == RESIDUAL}
    for name in sorted(residuals):
        residual = residuals[name].numbers().double() / unit
        norm = torch.linalg.vector_norm(residual).item()
        total = None
        if name in available and residual.numel() == available[name][1].numel:  # not only a part of the parameter
            bucket, param = available[name]
            gradient = as_residual(bucket, param, reduction, step).double()
            # The user zeroed the gradient in place, or nothing was sent. In both cases the share is unknown.
            if norm == 0 or gradient.any():
                both = gradient + residual.reshape(gradient.shape)
                total = torch.linalg.vector_norm(both).item() / state.versions.loss_scale
        found[name] = ResidualNorm(norm / state.versions.loss_scale, total)
    return found


def residual_figures(norms: Mapping[str, ResidualNorm]) -> dict[str, float]:
    """Return ``residual_norm/NAME`` and ``relative_error/NAME`` = ‖residual‖ / ‖gradient + residual‖ of each parameter."""
    figures = {}
    for name, norm in norms.items():
        figures[f"residual_norm/{name}"] = norm.residual
        if norm.relative is not None:
            figures[f"relative_error/{name}"] = norm.relative
    return figures


def combined(norms: Mapping[str, ResidualNorm], names: Iterable[str]) -> ResidualNorm | None:
    """Return the norm of several parameters as one vector; ``None`` if none of them has a residual.

    >>> combined({"a": ResidualNorm(3.0, 6.0), "b": ResidualNorm(4.0, 8.0)}, ["a", "b"]).relative
    0.5
    """
    some = [norms[name] for name in names if name in norms]
    if not some:
        return None
    totals = [one.total for one in some if one.total is not None]
    total = math.hypot(*totals) if len(totals) == len(some) else None
    return ResidualNorm(math.hypot(*(one.residual for one in some)), total)
