"""A DDP case with uneven inputs. Ranks without batches join, for two epochs."""

import copy

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join

from tests.campaign.checks import Sums, TorchRefuses, Wrong, digest, mean_owed, oracle, same_on_all_ranks
from tests.campaign.ddp import Loop, bounds_of, follow, own_gradients
from tests.campaign.draw import Case
from tests.campaign.notes import Notes

Recorded = list[tuple[dict[str, torch.Tensor | None], list[dict[str, torch.Tensor]]]]
EPOCHS = 2


def run(rank: int, world: int, case: Case, notes: Notes) -> dict[str, float]:
    """Run one case. Raise the first check that fails."""
    notes.phase("the same loop without a hook")
    try:
        _epoch(case, Loop(case, hooked=False), 0)
    except Exception as error:
        raise TorchRefuses(f"{type(error).__name__}: {error}") from error
    notes.phase("attach")
    loop, bounds, sums = Loop(case, hooked=True), bounds_of(case), Sums()
    for epoch in range(EPOCHS):
        notes.phase(f"epoch {epoch}")
        recorded = _epoch(case, loop, epoch)
        notes.phase(f"after epoch {epoch}")
        for step in range(case.steps):
            here = step < len(recorded)
            like = {name: torch.zeros_like(p).reshape(-1).double() for name, p in _real(loop).items()}
            truth = oracle(recorded[step][1] if here else [like])
            if case.entry.promise != "silent":
                _same_where_present(recorded[step][0] if here else None)
            grads = recorded[step][0] if here else {}
            everywhere: list[dict[str, torch.Tensor | None]] = [{}] * world
            dist.all_gather_object(everywhere, grads)
            grads = next(each for each in everywhere if each)
            for name, param in loop.names().items() if here or case.entry.promise != "silent" else ():
                bounds.near(name, grads[name] if not here else recorded[step][0][name], truth, param.dtype)
            sums.add(grads, truth)
    notes.phase("the end")
    if loop.door is None:
        raise AssertionError("the loop has no hook")
    params = loop.names()
    owed = mean_owed(loop.door.residuals(params), params)
    for name, param in params.items():
        bounds.conserved(name, sums, owed[name], param.dtype)
    if bounds.entry.promise != "silent":
        same_on_all_ranks(dict(loop.net.named_parameters()), "parameters")
    return loop.door.close()


def _real(loop: Loop) -> dict[str, torch.Tensor]:
    return {n: torch.view_as_real(p.detach()) if p.is_complex() else p.detach() for n, p in loop.names().items()}


def _epoch(case: Case, loop: Loop, epoch: int) -> Recorded:
    """Run one epoch. Ranks of odd number have one batch less, the last rank two less."""
    rank, world = dist.get_rank(), dist.get_world_size()
    mine = max(1, case.steps - rank % 2 - (rank == world - 1 and world > 1))
    bare = copy.deepcopy(loop.net)
    recorded: Recorded = []
    with Join([loop.ddp]):
        for step in range(mine):
            follow(bare, loop.net)
            number = epoch * case.steps + step
            own = own_gradients(bare, case, number, 1.0)
            recorded.append((loop.gradients(number, 1.0), own))
            loop.apply(True)
    return recorded


def _same_where_present(grads: dict[str, torch.Tensor | None] | None) -> None:
    every: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(every, digest(grads) if grads is not None else "")
    if len({each for each in every if each}) > 1:
        raise Wrong("same bits on all ranks", "gradients differ between ranks that have not joined")
