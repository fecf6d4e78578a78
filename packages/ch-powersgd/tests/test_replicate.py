"""Composable ``replicate()`` models support attach, figures, checkpoint, errors and detach as DDP does."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.nn.parallel import DistributedDataParallel

import commhooks
from ch_testing import Faulty, Injected, spawn

pytestmark = [pytest.mark.timeout(180), pytest.mark.gloo]
POWERSGD = "powersgd(rank=2, min_compression_rate=1)"


class Net(nn.Module):
    """Two compressed weights, one of which two modules share, and their biases."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.head = nn.Linear(24, 20), nn.Linear(20, 24), nn.Linear(20, 24)
        self.head.weight = self.second.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(x))
        return self.second(hidden) + self.head(hidden)


def replicated(like: nn.Module | None = None, **options: Any) -> nn.Module:
    model = replicate(Net(), bucket_cap_mb=0.001, **options)
    if like is not None:
        model.load_state_dict(like.state_dict())
    return model


def gradients(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    """Return the gradients of this rank's data after one backward."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    model(torch.randn(5, 24, generator=generator)).square().mean().backward()
    return torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])


def train(model: nn.Module, steps: range, rank: int) -> torch.Tensor:
    """Run SGD and return the parameters."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in steps:
        optimizer.zero_grad()
        gradients(model, step, rank)
        optimizer.step()
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).clone()


def as_with_ddp(rank: int, world: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    without, plain = replicated(), replicated()
    handle = commhooks.attach(plain, "allreduce")
    found["allreduce is no hook"] = torch.equal(train(plain, range(4), rank), train(without, range(4), rank))
    found["several buckets"] = handle.binding.calls > 4
    handle.assert_active()

    model, wrapped = replicated(), DistributedDataParallel(Net(), bucket_cap_mb=0.001)
    handle, beside = commhooks.attach(model, POWERSGD), commhooks.attach(wrapped, POWERSGD)
    found["powersgd is DDP's"] = torch.equal(train(model, range(3), rank), train(wrapped, range(3), rank))
    found["compressed"] = handle.stats()["compressed_steps"]
    found["the same bytes"] = handle.stats()["payload_bytes"] == beside.stats()["payload_bytes"] > 0
    found["plan"] = [row.name for row in handle.plan()]

    saved = handle.state_dict()
    found["named by the module"] = sorted(saved["entries"])
    again = replicated(model)
    gradients(again, 9, rank)  # its DDP exists before the hook
    resumed = commhooks.attach(again, POWERSGD)
    resumed.load_state_dict(saved)
    found["resumes"] = torch.equal(train(again, range(3, 5), rank), train(model, range(3, 5), rank))

    handle.detach()
    fresh = replicated(model)
    found["detached, it averages plainly"] = torch.equal(
        train(model, range(5, 7), rank), train(fresh, range(5, 7), rank)
    )
    return found


def test_as_with_ddp() -> None:
    names = ["first.weight", "first.bias", "second.weight", "second.bias", "head.bias"]
    for found in spawn(as_with_ddp, 2, timeout=150):
        assert found == {
            "allreduce is no hook": True,
            "several buckets": True,
            "powersgd is DDP's": True,
            "compressed": 3.0,
            "the same bytes": True,
            "plan": names,
            "named by the module": ["first.weight", "second.weight"],
            "resumes": True,
            "detached, it averages plainly": True,
        }


def raised(action: Any) -> str:
    try:
        action()
    except Exception as error:
        return type(error).__name__
    return ""


def in_trouble(rank: int, world: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    faulty = Faulty(commhooks.create("powersgd(rank=2, min_compression_rate=1)").reduction)
    model = replicated()
    handle = commhooks.attach(model, faulty)
    gradients(model, 0, rank)
    if rank == 1:
        faulty.arm("between")
    found["one rank raises"] = raised(lambda: gradients(model, 1, rank))
    model.zero_grad()
    everyone = [torch.empty_like(mine := gradients(model, 2, rank)) for _ in range(world)]
    torch.distributed.all_gather(everyone, mine)
    found["usable after it"] = bool(mine.isfinite().all()) and torch.equal(*everyone)
    found["attached twice"] = raised(lambda: commhooks.attach(model, "allreduce"))
    handle.detach()
    found["other hooks on the ranks"] = raised(lambda: commhooks.attach(model, ["allreduce", "bf16_compress"][rank]))
    again = commhooks.attach(model, "allreduce")

    model.set_requires_gradient_sync(False)
    model.zero_grad()
    gradients(model, 3, rank)
    found["steps without synchronisation"] = again.stats()["steps"]
    model.set_requires_gradient_sync(True)
    plain = replicated(model)
    plain.set_requires_gradient_sync(False)
    gradients(plain, 3, rank)
    plain.set_requires_gradient_sync(True)
    found["accumulates"] = torch.equal(gradients(model, 4, rank), gradients(plain, 4, rank))

    batch = torch.ones(2, 24)
    loss = model(batch).sum()
    loss.backward(retain_graph=True)
    found["a backward that DDP would not synchronise"] = raised(loss.backward)
    taken = replicated()
    taken.register_comm_hook(None, commhooks.get("noop"))
    found["a hook of one's own"] = raised(lambda: commhooks.attach(taken, "allreduce"))
    frozen = replicate(Net().requires_grad_(False))
    found["nothing to train"] = raised(lambda: commhooks.attach(frozen, "allreduce"))
    return found


def test_in_trouble() -> None:
    everywhere = {
        "usable after it": True,
        "attached twice": "SlotTakenError",
        "other hooks on the ranks": "RankMismatchError",
        "steps without synchronisation": 0.0,
        "accumulates": True,
        "a backward that DDP would not synchronise": "AttachError",
        "a hook of one's own": "SlotTakenError",
        "nothing to train": "AttachError",
    }
    found = spawn(in_trouble, 2, timeout=150)
    assert found[0] == {"one rank raises": "RemoteHookError", **everywhere}
    assert found[1] == {"one rank raises": Injected.__name__, **everywhere}
