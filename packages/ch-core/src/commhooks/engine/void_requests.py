"""The requests of a failed reduction's plan, so that no other rank waits for them: filled with NaN where they can say it.

What comes of them must not be used. On CUDA the error is told only when the optimizer's turn is over; until then NaN tells
a ``GradScaler`` to skip the step. Opaque bytes and indices are zeros: what a reduction makes of others is its own affair.
"""

import math

import torch

from commhooks.requests import AllGather, AllReduce, AllToAll, ReduceScatter, Request, StagePlan


def void_requests(planned: StagePlan, world_size: int, device: torch.device) -> tuple[Request, ...]:
    """One stage's requests, made of NaN, or of zeros where the numbers are no floating-point ones.

    Example:
        >>> from commhooks.requests import RequestPlan
        >>> void_requests((RequestPlan("all_reduce", 2, torch.float32),), 2, torch.device("cpu"))[0].tensor
        tensor([nan, nan])
        >>> void_requests((RequestPlan("all_gather", 4, torch.uint8),), 2, torch.device("cpu"))[0].input
        tensor([0, 0], dtype=torch.uint8)
    """
    made: list[Request] = []
    for p in planned:
        void = torch.zeros(p.numel, dtype=p.dtype, device=device)
        make_void(void)
        if p.kind == "all_reduce":
            made.append(AllReduce(void, p.op, p.wire))
        elif p.kind == "reduce_scatter":
            made.append(ReduceScatter(void, void[: p.numel // world_size].clone(), p.op, p.wire))
        elif p.kind == "all_gather":
            made.append(AllGather(void[: p.numel // world_size].clone(), void, wire=p.wire))
        else:
            made.append(AllToAll(void, torch.empty_like(void), wire=p.wire))
    return tuple(made)


def make_void(tensor: torch.Tensor) -> None:
    """Fill it with NaN, if it can hold one."""
    if tensor.is_sparse:
        tensor.mul_(math.nan)
    elif tensor.is_floating_point() or tensor.is_complex():
        tensor.fill_(math.nan)
