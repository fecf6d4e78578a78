"""Steps in which DDP leaves out its first, middle or last buckets end with the backward, as without a hook."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import ch_ddp
import commhooks
from ch_ddp.hook_function import as_hook
from ch_testing import spawn
from commhooks import HookState, Plain

pytestmark = [pytest.mark.timeout(150), pytest.mark.gloo]


class Layers(nn.Module):
    """Uses the layers that a call names, each of which has buckets of its own."""

    def __init__(self, *, reentrant: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.reentrant = reentrant
        self.layers = nn.ModuleList(nn.Linear(48, 48) for _ in range(4))

    def forward(self, x: torch.Tensor, used: tuple[int, ...]) -> torch.Tensor:
        for i in used:
            x = torch.tanh(checkpoint(self.layers[i], x, use_reentrant=True) if self.reentrant else self.layers[i](x))
        return x


def wrapped(*, reentrant: bool = False, **options: Any) -> DistributedDataParallel:
    net = Layers(reentrant=reentrant)
    return DistributedDataParallel(net, skip_all_reduce_unused_params=True, bucket_cap_mb=0.005, **options)


def gradients(model: nn.Module, rank: int, step: int, used: tuple[int, ...]) -> list[torch.Tensor | None]:
    model.zero_grad()
    x = torch.randn(4, 48, generator=torch.Generator().manual_seed(10 * step + rank))
    model(x.requires_grad_(), used).square().sum().backward()  # a reentrant checkpoint needs an input with a gradient
    return [p.grad.clone() if p.grad is not None else None for p in model.parameters()]


def equal(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is other is None if one is None or other is None else torch.equal(one, other)


def foreign(model: DistributedDataParallel) -> None:
    commhooks.attach(model, lambda state, bucket: allreduce_hook(None, bucket), timeout=20)


PLACES: dict[str, Callable[[DistributedDataParallel], object]] = {
    "attached": lambda model: commhooks.attach(model, "allreduce", timeout=20),
    "foreign": foreign,
    "detached": lambda model: commhooks.attach(model, "allreduce", timeout=20).detach(),
    "bare": lambda model: model.register_comm_hook(None, ch_ddp.allreduce_hook),
    "bare with a state": lambda model: model.register_comm_hook(HookState(), as_hook(Plain())),
}
USED = [(1, 2, 3), (0, 1, 2), (0, 3), (2,), (0, 1, 2, 3), (3,)]


def skipped(rank: int, world: int) -> list[str]:
    wrong = []
    static = {"static_graph": True}
    for options in ({"find_unused_parameters": True}, static, {**static, "reentrant": True}):
        for name, place in PLACES.items():
            plain, model = wrapped(**options), wrapped(**options)
            place(model)
            for step, used in enumerate(USED if "static_graph" not in options else [(1, 2)] * 4):
                want, have = gradients(plain, rank, step, used), gradients(model, rank, step, used)
                if not all(map(equal, want, have)):
                    wrong.append(f"{options} {name} step {step}")
    return wrong


def test_a_step_without_its_last_bucket_ends_with_the_backward() -> None:
    assert spawn(skipped, 2, timeout=140.0) == [[], []]


def stateful(rank: int, world: int) -> tuple[float, float, int]:
    """Return the part of the gradients that got lost, the number of steps, and the number of residuals."""
    model = wrapped(find_unused_parameters=True)
    handle = commhooks.attach(model, "powersgd(rank=2)", timeout=20)
    true = {name: torch.zeros_like(p) for name, p in model.module.named_parameters()}
    sent = {name: torch.zeros_like(p) for name, p in model.module.named_parameters()}
    alone = copy.deepcopy(model.module)
    for step, used in enumerate(USED):
        averaged, local = gradients(model, rank, step, used), gradients(alone, rank, step, used)
        for name, mine, mean in zip(true, local, averaged, strict=True):
            if mine is not None and mean is not None:
                true[name] += mine
                sent[name] += mean
    residuals = {name: rows["residual"] for name, rows in handle.state_dict()["entries"].items() if "residual" in rows}
    owed = torch.cat([(true[name] - residuals[name].view_as(true[name])).view(-1) for name in residuals])
    dist.all_reduce(owed)
    have = torch.cat([sent[name].view(-1) for name in residuals])
    return float((owed / world - have).norm() / have.norm()), handle.stats()["steps"], len(residuals)


def test_residuals_of_skipped_buckets_stay() -> None:
    for lost, steps, residuals in spawn(stateful, 2):
        assert lost < 1e-5
        assert (steps, residuals) == (6.0, 4)


def follows(rank: int, world: int) -> list[float]:
    """Return a gradient over the first group, and one over a group of this rank alone, if the first bucket is skipped."""
    alone = [dist.new_group([r]) for r in range(world)][rank]
    model = wrapped(find_unused_parameters=True)
    handle = commhooks.attach(model, "allreduce", timeout=20)
    found = []
    for _ in range(2):
        model.zero_grad()
        model(torch.full((1, 48), 1.0 + rank), (0,)).sum().backward()
        mine = model.module.layers[0].weight.grad
        assert mine is not None
        found.append(mine.clone())
        model._update_process_group(alone)
    everyone = [torch.empty_like(found[1]) for _ in range(world)]
    dist.all_gather(everyone, found[1])
    mean = torch.stack(everyone).mean(0)
    handle.assert_active()
    return [float((found[0] - mean).abs().max()), float((found[1] - mean).abs().max())]


def test_a_changed_group_is_followed_although_the_first_bucket_is_skipped() -> None:
    for over_all, alone in spawn(follows, 2):
        assert over_all < 1e-6
        assert alone > 1e-3
