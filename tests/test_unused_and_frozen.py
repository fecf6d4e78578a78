"""Parameters that no rank uses in a step, parameters frozen after wrapping, and a state loaded
before its model exists.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commhooks
from ch_powersgd import PowerSGDState, powerSGD_hook
from ch_testing import spawn

pytestmark = [pytest.mark.timeout(120), pytest.mark.gloo]


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.zeros(32, 32)), nn.Parameter(torch.zeros(32, 32))

    def forward(self, a: torch.Tensor, b: torch.Tensor | None) -> torch.Tensor:
        loss = (self.a * a).sum()
        return loss if b is None else loss + (self.b * b).sum()


def unused(rank: int, *, to_none: bool = True, bare: bool = False, micro: bool = False, twice: bool = False) -> float:
    """Return the lost part of the gradients of ``b``, which in some steps one rank uses, and in others none."""
    model = DistributedDataParallel(Two(), find_unused_parameters=True, bucket_cap_mb=0.001)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    handle: Any = None
    state: Any = PowerSGDState(None, 1, start_powerSGD_iter=2)
    if bare:
        model.register_comm_hook(state, powerSGD_hook)
    else:
        handle = commhooks.attach(model, "powersgd(rank=1)")
        state = handle.state
    own, true = torch.Generator().manual_seed(rank), torch.zeros(32, 32)
    for step in range(9):
        optimizer.zero_grad(set_to_none=to_none)
        wanted = None if step % 3 == 1 or (step % 3 == 2 and rank == 1) else torch.randn(32, 32, generator=own)
        if wanted is not None:
            true += wanted
        if micro and step % 2:  # used under no_sync() only, if at all
            with model.no_sync():
                model(torch.zeros(32, 32), wanted).backward()
            wanted = None
        model(torch.randn(32, 32, generator=own), wanted).backward()
        if twice:  # in a second averaged backward one rank or none uses b, and DDP averages or keeps the first average
            more = torch.randn(32, 32, generator=own) if rank == 0 and step % 2 else None
            true += more if more is not None else 0.0
            model(torch.randn(32, 32, generator=own), more).backward()
        optimizer.step()
    state.resolve_step()
    if bare:
        state.bind(model.module)
    sums = torch.stack([true, state.read("b", "residual")])
    dist.all_reduce(sums)
    mean = sums / dist.get_world_size()
    return float((mean[1] - model.module.b.detach() - mean[0]).norm() / mean[0].norm())


def frozen(rank: int) -> str:
    def attached() -> Any:
        model = DistributedDataParallel(Two(), find_unused_parameters=True)
        model.module.b.requires_grad_(False)
        handle = commhooks.attach(model, "powersgd(rank=1)")
        model(torch.ones(32, 32), torch.ones(32, 32)).backward()
        return handle

    saved = attached().state_dict()
    attached().load_state_dict(saved)
    return ", ".join(sorted(saved["entries"]))


def loaded_before(rank: int) -> str:
    model = DistributedDataParallel(Two())
    handle = commhooks.attach(model, "powersgd(rank=1)")
    model(torch.ones(32, 32), torch.ones(32, 32)).backward()
    saved = handle.state_dict()
    handle.detach()
    again = commhooks.create("powersgd(rank=1)")
    saved["entries"]["b"]["residual"] = torch.ones(16, 64)
    again.load_state_dict(saved)
    try:
        commhooks.attach(model, again)
    except commhooks.StateError as error:
        return str(error)
    return "attached"


def everything(rank: int, world: int) -> tuple[dict[str, float], str, str]:
    lost = {
        "dropped": unused(rank),
        "zeroed": unused(rank, to_none=False),
        "under no_sync()": unused(rank, micro=True),
        "zeroed, under no_sync()": unused(rank, to_none=False, micro=True),
        "zeroed, in a bare hook": unused(rank, to_none=False, bare=True),
        "two averaged backwards": unused(rank, twice=True),
    }
    return lost, frozen(rank), loaded_before(rank)


def test_nothing_is_lost_refused_or_taken_on_trust() -> None:
    for lost, saved, refused in spawn(everything, 2):
        assert all(part < 1e-5 for part in lost.values()), lost
        assert saved == "a, b"  # DDP averages what was trainable when it wrapped the model
        assert "the state of 'b', field 'residual', is [16, 64]" in refused
