"""Refuses a hook of low rank for parameters whose optimizer orthogonalises, such as Muon.

Muon gives all singular values of a step the same size. A gradient of rank r has r directions, so most of the step is lost, and
the residual cannot bring it back in time. With half of all directions, a small model ended within the spread of plain averaging.
"""

from collections.abc import Callable, Iterable

import torch

from ch_core import LATER, HookNotSupportedError
from commhooks.adapters.base import Binding
from commhooks.handle import CommHook


def orthogonalised(optimizer: torch.optim.Optimizer) -> Iterable[torch.Tensor]:
    """Return the parameters whose steps an optimizer orthogonalises.

    Public Muons have the word in their name, and a mark on each group if they step other parameters by Adam.
    """
    if not any("muon" in cls.__name__.lower() for cls in type(optimizer).__mro__):
        return []
    return [param for group in optimizer.param_groups if group.get("use_muon", True) for param in group["params"]]


def low_rank_refusal(
    handle: CommHook, binding: Binding
) -> Callable[[torch.optim.Optimizer], HookNotSupportedError | None] | None:
    """Return a function from an optimizer to the error that it must get; ``None`` if the hook sends nothing of low rank."""
    reduction, layout = handle.reduction, binding.layout.params
    if reduction is None or handle.alone:
        return None
    pairs = zip(binding.params, layout, strict=False)
    low = {id(tensor): param.name for tensor, param in pairs if reduction.low_rank(param, LATER)}
    expr = handle.expr  # the function must not keep the handle, which keeps the watch that keeps the function

    def refusal(optimizer: torch.optim.Optimizer) -> HookNotSupportedError | None:
        names = [low[id(param)] for param in orthogonalised(optimizer) if id(param) in low]
        if not names:
            return None
        return HookNotSupportedError(
            f"{expr} sends the gradients of {len(names)} parameters ({', '.join(names[:3])}) as matrices of low rank, and "
            f"{type(optimizer).__name__} gives all singular values of their steps the same size. So most of each step would be "
            "lost. Use a quantized hook such as quant4, a 16-bit one such as bf16_compress, or a policy with one of them for "
            "these parameters"
        )

    return refusal if low else None
