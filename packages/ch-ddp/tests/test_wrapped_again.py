"""A hook function or its state goes on when the module, or a new one of the same shapes, is wrapped again. One process.

Applied + owed must stay the sum of all gradients.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ch_ddp
from ch_powersgd import PowerSGDState, powerSGD_hook

SHAPE = (4, 3, 2, 2)


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Net(nn.Module):
    def __init__(self, count: int = 2) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(SHAPE)) for _ in range(count))

    def forward(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack([(p * one).sum() for p, one in zip(self.weights, gradients, strict=False)]).sum()


class Run:
    """A PowerSGDState, and the sums of all gradients and of all updates."""

    def __init__(self, count: int = 2) -> None:
        self.state = PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=1)
        self.true, self.applied = (torch.zeros(count, *SHAPE) for _ in range(2))

    def train(self, net: Net, *, used: int | None = None, first: int = 1, **options: Any) -> None:
        """Wrap the module, and train four steps. From the step ``first`` on only some parameters are used."""
        model = DistributedDataParallel(net, **options)
        model.register_comm_hook(self.state, powerSGD_hook)
        for step in range(4):
            model.zero_grad(set_to_none=False)
            given = torch.randn(self.true.shape)
            if step >= first and used is not None:
                given = given[:used]
            model(list(given)).backward()
            self.true[: len(given)] += given
            self.applied += torch.stack([p.grad for p in net.weights])  # zeros of a parameter that DDP leaves out

    def lost(self) -> float:
        self.state.resolve_step()
        owed = torch.stack([one.view(SHAPE) for _, field, one in self.state.entries() if field == "residual"])
        return float((self.applied + owed - self.true).norm() / self.true.norm())


def test_new_models_get_the_residuals_of_their_own_parameters() -> None:
    """Python gives new parameters the ids of freed ones, in any order."""
    run = Run(count=9)  # names by position are in order
    for _ in range(4):
        run.train(Net(count=9), bucket_cap_mb=1e-5)
    assert run.lost() < 1e-5


def test_a_module_in_another_memory_format_keeps_its_residuals() -> None:
    run, net = Run(), Net()
    run.train(net)
    run.train(net.to(memory_format=torch.channels_last))
    assert run.lost() < 1e-5


@pytest.mark.parametrize("step", [0, 1])
@pytest.mark.parametrize("first", [False, True])
def test_a_module_that_leaves_out_parameters_keeps_their_residuals(first: bool, step: int) -> None:
    """In the first step the hook function learns too late which parameters got a gradient."""
    run, net = Run(), Net()
    run.train(net, find_unused_parameters=first)
    run.train(net, find_unused_parameters=True, used=1, first=step)
    assert run.lost() < 1e-5


def test_the_state_of_a_group_that_is_gone_serves_the_next_group() -> None:
    run, net = Run(), Net()
    run.train(net)
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    run.train(net)
    assert run.lost() < 1e-5
    assert run.state.engine is not None
    assert run.state.engine.transport.group is dist.group.WORLD


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("hook", [ch_ddp.allreduce_hook, ch_ddp.bf16_compress_hook])
def test_a_module_of_another_dtype_is_averaged(hook: Any, dtype: torch.dtype) -> None:
    net = Net()
    for one in (torch.float32, dtype):
        net.to(one).zero_grad()
        model = DistributedDataParallel(net)
        model.register_comm_hook(None, hook)
        model(list(torch.ones(2, *SHAPE, dtype=one))).backward()
        assert all(bool((p.grad == 1).all()) for p in net.weights)
