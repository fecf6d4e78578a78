"""Ranks whose parameters differ in one bit."""

import torch
from torch.nn.parallel import DistributedDataParallel

import commhooks
from commhooks import RankMismatchError, RemoteHookError


def drifting(rank: int, world: int, sizes: list[int]) -> list[str]:
    """Return the error of each model whose last number differs in its last bit on one rank; empty if it has no error."""
    found = []
    for numel in sizes:
        module = torch.nn.Linear(numel, 1, bias=False)
        torch.nn.init.ones_(module.weight)
        model = DistributedDataParallel(module)
        commhooks.attach(model, "allreduce", check_ranks_every=1, on_drift="raise")
        errors = []
        for flipped in (False, True):
            with torch.no_grad():
                if flipped and rank == 1:
                    module.weight.view(torch.int32)[0, -1] ^= 1
            try:
                model(torch.ones(1, numel)).sum().backward()
                errors.append("")
            except (RankMismatchError, RemoteHookError) as error:
                errors.append(str(error))
        assert not errors[0], errors[0]
        found.append(errors[1])
    return found
