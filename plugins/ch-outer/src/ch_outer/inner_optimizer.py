"""The inner optimizer, which steps this rank alone, also under a ``GradScaler`` around the outer optimizer."""

from collections.abc import Callable
from typing import Any

import torch

from ch_ddp import WrappedOptimizer, unscale


class InnerOptimizer(WrappedOptimizer):
    """Wraps an optimizer so that each step counts, also a step that a ``GradScaler`` skips."""

    _step_supports_amp_scaling = (
        True  # without it a GradScaler does not call step() when it skips, and ranks' counts differ
    )

    def scaled_step(self, closure: Callable[[], Any] | None) -> Any:
        """Step the wrapped optimizer as a ``GradScaler`` would: unscale first, or skip. Return the closure's result."""
        scale: torch.Tensor | None = getattr(self, "grad_scale", None)  # 0-d; a GradScaler sets both for this call
        found: torch.Tensor | None = getattr(self, "found_inf", None)  # 0-d
        if found is None:
            return self.inner_step(closure)
        if getattr(self.optim, "_step_supports_amp_scaling", False):
            inner: Any = self.optim
            inner.grad_scale, inner.found_inf = scale, found
            try:
                return self.inner_step(closure)
            finally:
                del inner.grad_scale, inner.found_inf
        if found.item():
            return None
        unscale(self.optim, scale)
        return self.inner_step(closure)
