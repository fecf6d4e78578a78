"""``run --outer`` refuses an optimizer whose step sends messages between the ranks that exchange, by name."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ch_run.own_messages import OwnMessages
from ch_testing import spawn
from commhooks import HookNotSupportedError

pytestmark = [pytest.mark.gloo, pytest.mark.timeout(120)]


def gathering(send: Callable[[torch.Tensor], object]) -> type[torch.optim.SGD]:
    class Gathering(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            super().step()
            if any(p.grad is not None for group in self.param_groups for p in group["params"]):
                send(self.param_groups[0]["params"][0].detach())

    return Gathering


def said(rank: int, world: int) -> list[str]:
    """Return the errors of optimizers. They exchange with rank 0 or 1, and a replica has the ranks 0 and 1, or 2 and 3."""
    exchange = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    replica = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    rows = [torch.zeros(4) for _ in range(4)]
    sends: list[Callable[[torch.Tensor], object]] = [
        lambda p: dist.broadcast(p, 0),
        lambda p: dist.all_gather(rows, p),
        lambda p: dist.all_reduce(p, group=exchange),
        lambda p: dist.all_reduce(p, group=replica),
        lambda p: None,
    ]
    found = []
    for send in sends:
        p = nn.Parameter(torch.zeros(4))
        optimizer = gathering(send)([p], lr=0.1)
        OwnMessages(optimizer, "Net", exchange)
        try:
            optimizer.step()  # a step that a GradScaler skips has no gradients, and proves nothing
            p.grad = torch.ones(4)
            optimizer.step()
            found.append("")
        except HookNotSupportedError as error:
            found.append(str(error))
        dist.barrier()
    return found


def test_an_optimizer_that_sends_between_the_ranks_that_exchange_is_refused() -> None:
    for found in spawn(said, 4, timeout=90):
        assert all("cannot train Net with Gathering, whose step sends its own messages" in one for one in found[:3])
        assert found[3:] == ["", ""]
