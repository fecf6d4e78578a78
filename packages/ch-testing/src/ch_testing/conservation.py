"""The law of error feedback: every part of a gradient arrives, if late.

Summed over steps, the averages that were applied plus the mean residual that the ranks still owe equal the mean
gradients (Karimireddy et al. 2019, arXiv:1901.09847). The contract kit, the campaign and the fault table measure breaches of
the law with :func:`unaccounted`.
"""

from collections.abc import Mapping, Sequence

import torch

Tensors = Mapping[str, torch.Tensor]
Readings = Mapping[str, tuple[torch.Tensor, torch.Tensor]]
"""By parameter, a residual read in the parameter's own order and in the order of memory: ``(numel,)`` fp64 each."""


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's numbers in logical order, ``(numel,)`` fp64 (twice as many for a complex tensor), on the CPU."""
    dense = tensor.detach().to_dense() if tensor.layout != torch.strided else tensor.detach()
    numbers = torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense
    return numbers.reshape(-1).to("cpu", torch.float64)


def readings(residual: torch.Tensor, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a residual's numbers in the parameter's logical order, read both ways.

    A residual has the parameter's own shape, or the parameter's numbers in the order of memory (see
    :attr:`.Reduction.memory_order_fields`). A transposed square matrix does not show which.

    Args:
        residual: as a state holds it.
        like: a tensor with the parameter's shape and strides.
    """
    own = flat(residual)
    if like.is_contiguous() or like.is_complex():
        return own, own
    back = torch.empty_like(like, dtype=torch.float64, device="cpu")
    if back.stride() != like.stride():  # the strides leave holes, so a bucket holds this parameter row by row
        return own, own
    back.as_strided((like.numel(),), (1,)).copy_(own)
    return own, back.reshape(-1)


def mean_residuals(ranks: Sequence[Tensors], like: Tensors) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return every parameter's residual averaged over ranks, in both readings. Missing residuals count as zeros."""
    found = {}
    for name, tensor in like.items():
        zeros = torch.zeros_like(flat(tensor))
        both = [readings(one[name], tensor) if name in one else (zeros, zeros) for one in ranks]
        own, memory = zip(*both, strict=True)
        found[name] = torch.stack(own).mean(0), torch.stack(memory).mean(0)
    return found


def unaccounted(wanted: Tensors, applied: Tensors, owed: Readings, before: Readings | None = None) -> dict[str, float]:
    """Return, by parameter, the norm of ``wanted + before - applied - owed``. By the law it is zero but for rounding.

    Args:
        wanted: sum over steps of the gradients' mean over ranks. Its names are the parameters that are checked.
        applied: sum over steps of the averages that the hook left; a missing one counts as zeros.
        owed: mean residuals after the last step.
        before: mean residuals before the first step; zeros if not given.

    Example:
        >>> like = {"w": torch.zeros(2)}
        >>> owed = mean_residuals([{"w": torch.tensor([1.0, 0.0])}, {"w": torch.tensor([0.0, 1.0])}], like)
        >>> unaccounted({"w": torch.tensor([1.5, 0.5])}, {"w": torch.tensor([1.0, 0.0])}, owed)
        {'w': 0.0}
    """
    found = {}
    for name, mean in wanted.items():
        gap = flat(mean)
        if name in applied:
            gap = gap - flat(applied[name])
        gaps = [gap, gap]
        if name in owed:
            gaps = [one - kept for one, kept in zip(gaps, owed[name], strict=True)]
        if before is not None and name in before:
            gaps = [one + kept for one, kept in zip(gaps, before[name], strict=True)]
        found[name] = min(float(one.norm()) for one in gaps)
    return found
