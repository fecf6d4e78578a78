"""Figures of error feedback, computed when asked for: how much of the gradient is held back, and where."""

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch

from commhooks.engine.engine import Engine
from commhooks.engine.outcome import Phase
from commhooks.engine.sampling import ordered


class HeldBack(NamedTuple):
    """What a parameter's residual amounts to.

    Attributes:
        residual: its norm, unscaled.
        whole: the norm of gradient plus residual, in the same units; ``None`` where the gradient is gone.
    """

    residual: float
    whole: float | None

    @property
    def relative(self) -> float | None:
        """The part of the gradient that was held back, of 1."""
        if self.whole is None:
            return None
        return self.residual / self.whole if self.whole > 0 else 0.0


def held_back(engine: Engine) -> dict[str, HeldBack]:
    """Of every parameter that has a residual; the last finished step's, and this rank's.

    The gradient is left out where it is gone, and with FSDP2, whose gradients would otherwise live on, in the first call:
    from then on the engine keeps them.
    """
    engine.keep_buckets()
    state, found = engine.state, {}
    step = state.step if engine.outcome.phase is Phase.DECIDED else max(state.step - 1, 0)  # the one that made them
    shown = {p.name: (bucket, p) for bucket in engine.buckets.kept for p in bucket.params}
    for name in sorted({name for name, field in state.held() if field == "residual"}):
        residual = state.newest(name, "residual")
        norm = torch.linalg.vector_norm(residual.double()).item()
        whole = None
        if name in shown:
            bucket, param = shown[name]
            gradient = ordered(bucket, param, engine.reduction, step).double()
            if (
                norm == 0 or gradient.any()
            ):  # zeroed in place since, or nothing was sent: neither tells what was held back
                whole = (
                    torch.linalg.vector_norm(gradient + residual.double().reshape(gradient.shape)).item() / state.scale
                )
        found[name] = HeldBack(norm / state.scale, whole)
    return found


def residual_figures(engine: Engine) -> dict[str, float]:
    """``residual_norm/NAME`` and ``relative_error/NAME`` = ‖residual‖ / ‖gradient + residual‖ of :func:`held_back`."""
    figures = {}
    for name, held in held_back(engine).items():
        figures[f"residual_norm/{name}"] = held.residual
        if held.relative is not None:
            figures[f"relative_error/{name}"] = held.relative
    return figures


def together(held: Mapping[str, HeldBack], names: Iterable[str]) -> HeldBack | None:
    """Several parameters as one vector; ``None`` if none of them has a residual.

    >>> together({"a": HeldBack(3.0, 6.0), "b": HeldBack(4.0, 8.0)}, ["a", "b"]).relative
    0.5
    """
    some = [held[name] for name in names if name in held]
    if not some:
        return None
    wholes = [one.whole for one in some if one.whole is not None]
    whole = math.hypot(*wholes) if len(wholes) == len(some) else None
    return HeldBack(math.hypot(*(one.residual for one in some)), whole)
