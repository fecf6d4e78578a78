"""The full matrix on real gloo processes: `nox -s soak`.

Trains every PowerSGD and every wrapper over it on two and four processes for 200 steps. The cases have 1, 3 and more than
10 buckets, with and without unused parameters. nox sets ``COMMHOOKS_SOAK_REPEATS`` to 20 repeats.
"""

import itertools
import os

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commhooks
from ch_testing import spawn

REPEATS = int(os.environ.get("COMMHOOKS_SOAK_REPEATS", "1"))
STEPS = 200
CAPS = {1: 25.0, 3: 0.03, 12: 0.0001}  # buckets -> bucket_cap_mb
HOOKS = [
    "powersgd(rank=1)",
    "powersgd(rank=4)",
    "batched_powersgd(rank=2)",
    "fp16_wrapper(powersgd(rank=4))",
    "bf16_wrapper(powersgd(rank=4))",
    "bf16_wrapper(powersgd(rank=1), accumulate='fp32')",
    "fp16_wrapper(batched_powersgd(rank=2))",
    "bf16_wrapper(batched_powersgd(rank=2))",
]


class Net(nn.Module):
    """Five layers. The model uses one at even steps only and one never."""

    def __init__(self, unused: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(40, 40) for _ in range(5))
        self.sometimes = nn.Linear(40, 40)
        if unused:
            self.never = nn.Linear(40, 24)

    def forward(self, x: torch.Tensor, some: bool) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.sometimes(x) if some else x


def one_case(rank: int, expression: str, buckets: int, unused: bool) -> torch.Tensor:
    model = DistributedDataParallel(Net(unused), bucket_cap_mb=CAPS[buckets], find_unused_parameters=unused)
    handle = commhooks.attach(model, expression)
    torch.manual_seed(1 + rank)
    x = torch.randn(16, 40)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(x, not unused or step % 2 == 0).sub(x.roll(1, 0)).square().mean().backward()
        optimizer.step()
    stats = handle.stats()
    assert stats["steps"] == stats["compressed_steps"] == STEPS, (expression, buckets, unused, stats)
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def matrix(rank: int, world: int) -> int:
    """Run all cases. Every rank must end with the same finite parameters."""
    cases = list(itertools.product(HOOKS, CAPS, (False, True)))
    for expression, buckets, unused in cases:
        flat = one_case(rank, expression, buckets, unused)
        everyone = [torch.empty_like(flat) for _ in range(world)]
        dist.all_gather(everyone, flat)
        assert bool(flat.isfinite().all()), (expression, buckets, unused)
        assert all(torch.equal(flat, other) for other in everyone), (expression, buckets, unused)
    return len(cases)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("repeat", range(REPEATS))
@pytest.mark.parametrize("world", [2, 4])
def test_full_matrix(world: int, repeat: int) -> None:
    assert spawn(matrix, world, timeout=1700.0) == [len(HOOKS) * len(CAPS) * 2] * world


def independence(rank: int, world: int) -> float:
    """Return the largest relative difference between the parameters after training with each bucket size."""
    ends = [one_case(rank, "powersgd(rank=4)", buckets, False) for buckets in CAPS]
    return max(float((end - ends[0]).norm() / ends[0].norm()) for end in ends[1:])


@pytest.mark.full
@pytest.mark.timeout(180)
@pytest.mark.parametrize(("world", "tolerance"), [(2, 0.0), (4, 1e-6)])
def test_the_buckets_do_not_matter_on_real_processes(world: int, tolerance: float) -> None:
    assert max(spawn(independence_short, world, timeout=170.0)) <= tolerance


def independence_short(rank: int, world: int) -> float:
    global STEPS
    STEPS = 12
    return independence(rank, world)
