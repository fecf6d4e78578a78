"""``attach(link=)``: ranks that are far apart train to one model, agree on their link, and remember it."""

import os
import signal
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commhooks
from ch_testing import LogLines, spawn
from commhooks import HookConfigError, RankMismatchError, TransportError

pytestmark = [pytest.mark.gloo, pytest.mark.timeout(200)]

HOOKS = ("allreduce", "bf16_compress", "quant4(error_feedback=True)", "powersgd(rank=4)", "topk(density=0.01)")


def wrapped() -> DistributedDataParallel:
    torch.manual_seed(0)
    layers = [nn.Linear(300, 500), nn.ReLU(), nn.Linear(500, 700), nn.ReLU(), nn.Linear(700, 90)]
    return DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=0.5)


def train(model: nn.Module, rank: int, steps: int) -> torch.Tensor:
    optimizer, generator = torch.optim.SGD(model.parameters(), lr=0.1), torch.Generator().manual_seed(rank)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 300, generator=generator)).square().mean().backward()
        optimizer.step()
    return torch.cat([p.detach().view(-1) for p in model.parameters()])


def far_and_near(rank: int, world: int) -> dict[str, list[torch.Tensor]]:
    found: dict[str, list[torch.Tensor]] = {}
    for hook in HOOKS:
        for link in ("far", None):
            model = wrapped()
            commhooks.attach(model, hook, link=link)
            found.setdefault(hook, []).append(train(model, rank, 5))
    return found


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.full), pytest.param(4, marks=pytest.mark.full)])
def test_far_ranks_hold_one_model_and_two_of_them_the_bits_of_near_ones(world: int) -> None:
    ranks = spawn(far_and_near, world, timeout=150)
    for hook in HOOKS:
        far, near = ranks[0][hook]
        assert all(torch.equal(far, other[hook][0]) for other in ranks), hook
        if world == 2:
            assert torch.equal(far, near), hook
        else:
            assert (far - near).norm() < 2e-4 * near.norm(), hook


def remembers(rank: int, world: int) -> list[Any]:
    torch.distributed.new_group([0])  # torch could name groups by the number of groups that a rank is in
    model, lines = wrapped(), LogLines()
    with pytest.raises(RankMismatchError, match="200mbit,80ms"):
        commhooks.attach(model, "quant4", link="far" if rank else "100mbit,80ms")
    handle = commhooks.attach(model, "powersgd(rank=4)", link="far")
    train(model, rank, 2)
    assert "on a link of 200mbit,80ms" in str(handle.report())
    saved = handle.state_dict()
    found = []
    for link in ("200mbit,80ms", "1gbit,80ms", None):
        handle.detach()
        handle = commhooks.attach(model, "powersgd(rank=4)", link=link)
        lines.lines.clear()
        handle.load_state_dict(saved)
        found.append(any("continues with other bits" in line for line in lines.lines))
    return found


def test_ranks_agree_on_the_link_and_a_state_remembers_it() -> None:
    assert spawn(remembers, 2, timeout=150) == [[False, True, True]] * 2


def killed(rank: int, world: int) -> str:
    model = wrapped()
    commhooks.attach(model, "quant4", link="far", timeout=20.0)
    train(model, rank, 2)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(TransportError):
        train(model, rank, 3)
    torch.distributed.destroy_process_group()  # without the barrier at the end of a test
    return "raised"


def test_a_killed_rank_is_an_error_on_the_far_one() -> None:
    assert spawn(killed, 2, timeout=150, expect_exit={1: -signal.SIGKILL}) == ["raised", None]


def test_a_link_that_is_none_is_refused() -> None:
    with pytest.raises(HookConfigError, match="expected a rate and a round trip"):
        commhooks.attach(nn.Linear(2, 2), "quant4", link="near")
    with pytest.raises(HookConfigError, match="a manager has its own messages"):
        commhooks.Reducer("quant4", {"w": torch.zeros(2)}, link="far", manager=object())
