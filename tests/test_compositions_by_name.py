"""Compositions by name on gloo processes, compared with the hooks that they combine."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commhooks
from ch_testing import spawn

pytestmark = [pytest.mark.timeout(120), pytest.mark.gloo]

POLICY = {"*.norm*": "allreduce", "*.bias": "allreduce", "*": "powersgd(rank=2)"}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.norm, self.down = nn.Linear(24, 64), nn.LayerNorm(64), nn.Linear(64, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.norm(self.up(x)).relu())


def wrapped(cap: float = 0.001) -> DistributedDataParallel:
    return DistributedDataParallel(Net(), bucket_cap_mb=cap)


def train(model: nn.Module, rank: int, steps: int = 4) -> dict[str, torch.Tensor]:
    """Return the last step's gradients by name."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(50 + rank)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 24, generator=generator)).pow(2).mean().backward()
        optimizer.step()
    return {name: p.grad.clone() for name, p in model.module.named_parameters()}


def body(rank: int, world: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for expr in ("allreduce", "powersgd(rank=2)"):
        model = wrapped()
        handle = commhooks.attach(model, expr)
        found[expr] = train(model, rank), handle.stats()
    for key, cap in (("policy", 0.001), ("policy, one bucket", 25.0)):
        model = wrapped(cap)
        handle = commhooks.attach(model, POLICY)
        found[key] = train(model, rank), handle.stats()
        found["plan"] = {row.name: row.treatment for row in handle.plan()}
        found["round trip"] = commhooks.create(handle.expr).expr == handle.expr
    for expr in (
        "warmup(powersgd(rank=2), steps=2)",
        "warmup(bf16_compress, powersgd(rank=2), steps=2)",
        "error_feedback(fp16_compress)",
        "bf16_wrapper(policy({'*.bias': allreduce, '*': powersgd(rank=2)}))",
        "policy({'*.weight': error_feedback(bf16_compress), '*': fp16_compress})",
    ):
        model = wrapped()
        handle = commhooks.attach(model, expr)
        found[expr] = train(model, rank), handle.stats()
        handle.assert_active()
    model = wrapped()
    with pytest.raises(commhooks.HookConfigError, match=r"norm\.weight"):
        commhooks.attach(model, {"*.bias": "allreduce", "up*": "allreduce", "down*": "allreduce"})
    commhooks.attach(model, "allreduce")  # the refusals left nothing behind
    assert train(model, rank).keys() == found["plan"].keys()
    return found


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.full)])
def test_compositions(world: int) -> None:
    ranks = spawn(body, world)
    for key in ranks[0]:
        if isinstance(ranks[0][key], tuple):
            gradients, stats = ranks[0][key]
            for other in ranks[1:]:
                assert all(torch.equal(gradients[n], other[key][0][n]) for n in gradients), key
            assert (stats["compressed_steps"] > 0) == (key != "allreduce"), key
    found = ranks[0]
    assert found["round trip"]
    assert found["plan"] == {
        name: "powersgd" if name in ("up.weight", "down.weight") else "allreduce" for name in found["plan"]
    }
    exact, powersgd, mixed = (found[key] for key in ("allreduce", "powersgd(rank=2)", "policy"))
    # PowerSGD averages 1-D parameters plainly, so this policy is PowerSGD written in full, with equal gradients, bytes
    # and rounds. (Four ranks add in an order that depends on an element's place in the message.)
    close = torch.equal if world == 2 else torch.allclose
    assert all(close(mixed[0][n], powersgd[0][n]) for n in mixed[0])
    for figure in ("payload_bytes", "rounds"):
        assert mixed[1][figure] == powersgd[1][figure]
    assert all(torch.allclose(mixed[0][n], found["policy, one bucket"][0][n], atol=1e-6) for n in mixed[0])
    assert mixed[1]["payload_bytes"] < exact[1]["payload_bytes"]
    assert found["warmup(powersgd(rank=2), steps=2)"][1]["compressed_steps"] == 2
    assert found["warmup(bf16_compress, powersgd(rank=2), steps=2)"][1]["compressed_steps"] == 4
