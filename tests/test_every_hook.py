"""Every hook by name on DDP, in one world of ranks: the same bits on all ranks, and DDP's average as far as it promises.

With ``--device cuda`` this is the shortest test of all hooks over NCCL.
"""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commhooks
from ch_testing import spawn
from commhooks import canonical
from commhooks.registry.expression import nodes

pytestmark = pytest.mark.timeout(240)
STEPS, WIDTH = 3, 256
NOISE = {"quant": 0.5, "quant2": 0.5, "quant4": 0.2, "sign": 1.0}  # of one step, relative to the average
ROUNDING = 0.05  # of 16 and 8 bits
COMPOSED = [
    "bf16_wrapper(powersgd(rank=4))",
    "error_feedback(bf16_compress)",
    "warmup(powersgd(rank=4), steps=2)",
    "policy({'*.bias': allreduce, '*': quant4})",
    "bf16_compress(accumulate='fp32')",
]


def hooks() -> list[str]:
    """Return every reduction's example, its bare name, and compositions."""
    found = [text for spec in commhooks.list_hooks(kind="reduction") for text in (spec.name, spec.example)]
    return list(dict.fromkeys([*found, *COMPOSED]))


def allowed(expression: str) -> float | None:
    """Return the largest distance of one step from the average, or None if a method promises it over many steps only."""
    hook = commhooks.create(expression)
    assert hook.reduction is not None
    if "residual" in hook.reduction.fields or skips(expression):
        return None
    if not hook.reduction.lossy:
        return 1e-6
    return max(NOISE.get(node["hook"], ROUNDING) for node in nodes(canonical(expression)))


def skips(expression: str) -> bool:
    """True if ranks may keep different gradients for a while."""
    return any("skips_sync" in commhooks.spec(node["hook"]).capabilities for node in nodes(canonical(expression)))


def wrapped(device: torch.device) -> DistributedDataParallel:
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, device=device) for _ in range(4)))
    return DistributedDataParallel(net, bucket_cap_mb=1.5 * 4 * WIDTH**2 / 2**20)


def gradients(model: DistributedDataParallel, rank: int) -> torch.Tensor:
    """Return the gradients of several steps, ``(steps, numbers)``."""
    found, device = [], next(model.parameters()).device
    for step in range(STEPS):
        model.zero_grad()
        generator = torch.Generator().manual_seed(100 * step + rank)
        model(torch.randn(8, WIDTH, generator=generator).to(device)).square().mean().backward()
        found.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    return torch.stack(found)


def body(rank: int, world: int, expressions: list[str], alone: bool) -> dict[str, tuple[bool, bool, float]]:
    """Return, by hook: if all ranks have the same bits, if those are plain DDP's, and the distance from them."""
    device = torch.get_default_device()
    if alone:
        torch.set_default_device("cpu")
    exact = gradients(wrapped(device), rank)
    rows = {}
    for expression in expressions:
        model = wrapped(device)
        handle = commhooks.attach(model, expression)
        found = gradients(model, rank)
        handle.check()
        handle.detach()
        everyone = [torch.empty_like(found) for _ in range(world)]
        dist.all_gather(everyone, found)
        same = all(torch.equal(found, other) for other in everyone)
        distance = float((found - exact).norm() / exact.norm())
        rows[expression] = same, torch.equal(found, exact), distance
    return rows


@pytest.mark.full
@pytest.mark.parametrize("alone", [False, True], ids=["the rank's default device", "torch's default device"])
def test_every_hook_averages_over_the_ranks(alone: bool) -> None:
    """With torch's default device, a tensor of ours that is made without a device lies on the wrong one."""
    expressions = hooks()
    wrong = []
    for rows in spawn(body, 2, expressions, alone, timeout=220.0):
        assert rows.keys() == set(expressions)
        for expression, (same, bits, distance) in rows.items():
            limit = allowed(expression)
            right = bits if expression == "allreduce" else limit is None or distance <= limit
            if not right or not (same or skips(expression)):
                wrong.append((expression, same, bits, distance, limit))
    assert not wrong
