"""The requests of a failed reduction's plan, filled with zeros, so that no other rank waits for them."""

import torch

from commhooks.requests import AllGather, AllReduce, AllToAll, ReduceScatter, Request, StagePlan


def zero_requests(planned: StagePlan, world_size: int, device: torch.device) -> tuple[Request, ...]:
    """One stage's requests, made of zeros; the others then wait for nobody.

    Example:
        >>> from commhooks.requests import RequestPlan
        >>> zero_requests((RequestPlan("all_gather", 4, torch.float32),), 2, torch.device("cpu"))[0].input
        tensor([0., 0.])
    """
    made: list[Request] = []
    for p in planned:
        zeros = torch.zeros(p.numel, dtype=p.dtype, device=device)
        if p.kind == "all_reduce":
            made.append(AllReduce(zeros, p.op, p.wire))
        elif p.kind == "reduce_scatter":
            made.append(ReduceScatter(zeros, zeros[: p.numel // world_size].clone(), p.op, p.wire))
        elif p.kind == "all_gather":
            made.append(AllGather(zeros[: p.numel // world_size].clone(), zeros, wire=p.wire))
        else:
            made.append(AllToAll(zeros, torch.empty_like(zeros), wire=p.wire))
    return tuple(made)
