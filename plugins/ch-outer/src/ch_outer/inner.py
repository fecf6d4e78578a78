"""The optimizer inside: stepped on this rank alone, with or without a ``GradScaler`` around the outer one."""

from collections.abc import Callable
from typing import Any

import torch

from ch_ddp import WrappedOptimizer


class InnerOptimizer(WrappedOptimizer):
    """A wrapped optimizer whose every step counts, also one that a ``GradScaler`` skips."""

    _step_supports_amp_scaling = True  # a GradScaler then calls step() also when it skips, as the count has to go on

    def scaled_step(self, closure: Callable[[], Any] | None) -> Any:
        """The wrapped optimizer's step, as a ``GradScaler`` around this one has it: unscaled here, there, or skipped."""
        scale: torch.Tensor | None = getattr(self, "grad_scale", None)  # both set by a GradScaler, around this call
        found: torch.Tensor | None = getattr(self, "found_inf", None)
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
        if scale is not None:
            inverse = scale.double().reciprocal().float()  # in GradScaler's own arithmetic
            for group in self.param_groups:
                for param in group["params"]:
                    if param.grad is not None:
                        param.grad.mul_(inverse.to(param.grad.device))
        return self.inner_step(closure)
