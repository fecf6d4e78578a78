"""Every hook by name over NCCL, one GPU per rank, gives the same bits on all ranks, near DDP's own average.

The tests are skipped without a GPU. With one GPU the world has one rank, which still runs every CUDA stream and future.
"""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commhooks
from ch_testing import spawn

GPUS = torch.cuda.device_count()
pytestmark = [
    pytest.mark.nccl,
    pytest.mark.timeout(300),
    pytest.mark.skipif(GPUS == 0, reason="no CUDA device"),
]
TOLERANCE = {
    "allreduce": 1e-6,
    "fp16_compress": 1e-3,
    "bf16_compress": 1e-2,
    "bf16_compress(accumulate='fp32')": 1e-2,
    "powersgd(rank=4)": None,
    "bf16_wrapper(powersgd(rank=4))": None,
}


def body(rank: int, world: int) -> dict[str, float]:
    def wrapped() -> DistributedDataParallel:
        torch.manual_seed(0)
        net = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4))).cuda()
        return DistributedDataParallel(net, device_ids=[rank], bucket_cap_mb=0.2)

    found = {}
    for expression in TOLERANCE:
        model, reference = wrapped(), wrapped()
        handle = commhooks.attach(model, expression)
        torch.manual_seed(rank)
        for _ in range(20):
            x = torch.randn(32, 256, device="cuda")
            for each in (model, reference):
                each.zero_grad()
                each(x).square().mean().backward()
        flat = torch.cat([p.grad.flatten() for p in model.parameters()])
        exact = torch.cat([p.grad.flatten() for p in reference.parameters()])
        everyone = [torch.empty_like(flat) for _ in range(world)]
        dist.all_gather(everyone, flat)
        assert all(torch.equal(flat, other) for other in everyone), expression
        assert bool(flat.isfinite().all()), expression
        handle.check()
        assert handle.stats()["steps"] == 20
        found[expression] = float((flat - exact).norm() / exact.norm())
    return found


def test_hooks_by_name_over_nccl() -> None:
    for result in spawn(body, GPUS, backend="nccl", timeout=280.0):
        for expression, error in result.items():
            tolerance = TOLERANCE[expression]
            assert tolerance is None or error <= tolerance, (expression, error)
