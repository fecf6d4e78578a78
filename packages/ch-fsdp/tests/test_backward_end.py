"""Ends of backwards that are easy to miscount, after several roots, unexpected calls or a forward in between."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

import commhooks
from ch_testing import spawn
from commhooks import HookNotSupportedError, HookResultError

from .fsdp_kit import grads

pytestmark = [pytest.mark.timeout(180), pytest.mark.gloo]

WIDTH = 12


class Towers(nn.Module):
    """Two parts that a caller runs one by one. The whole module has no forward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(2))

    def loss(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        out = self.left(x).square().mean()
        return out + self.right(x).square().mean() if both else out


def mesh() -> Any:
    return init_device_mesh(
        torch.get_default_device().type, (dist.get_world_size(), 1), mesh_dim_names=("replicate", "shard")
    )["shard"]


def sharded(model: Any, *parts: nn.Module, **options: Any) -> Any:
    place = mesh()
    for part in parts:
        fully_shard(part, mesh=place, **options)
    return fully_shard(model, mesh=place, **options)


def data(step: int, rank: int) -> torch.Tensor:
    return torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def same_everywhere(model: nn.Module) -> None:
    for name, grad in grads(model).items():
        every = [torch.empty_like(grad) for _ in range(dist.get_world_size())]
        dist.all_gather(every, grad)
        assert all(torch.equal(every[0], one) for one in every), name


def body_towers(rank: int, world: int) -> None:
    for used in ((True, True, True), (True, True, False), (False, True, False)):  # True if rank 1 uses both towers
        model = Towers()
        sharded(model, *model.left, model.left, *model.right, model.right)
        handle = commhooks.attach(model, "allreduce", timeout=20)
        for step, both in enumerate(used):
            model.zero_grad()
            model.loss(data(step, rank), both or rank == 0).backward()
            ref = Towers()
            sum(ref.loss(data(step, other), both or other == 0) / world for other in range(world)).backward()
            for name, p in ref.named_parameters():
                torch.testing.assert_close(grads(model)[name], p.grad, msg=f"{used} {step} {name}")
            assert handle.stats()["steps"] == step + 1


def test_a_backward_of_two_towers_is_one_step() -> None:
    spawn(body_towers, 2, timeout=150)


def body_rounding(rank: int, world: int) -> None:
    """Check that early averages by torch and late averages by the handle round in the same way."""
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64, dtype=torch.bfloat16) for _ in range(3)))
    sharded(model, *model, mp_policy=policy)
    commhooks.attach(model, "allreduce", timeout=20)
    for step in range(4):
        generator = torch.Generator().manual_seed(10 * step + rank)
        x = torch.randn(6, 64, generator=generator).bfloat16()
        if rank == 1:
            with torch.no_grad():
                model(x)  # FSDP2 counts this use as one with a backward
        model(x).square().sum().backward()
        same_everywhere(model)


def test_late_averages_are_rounded_as_torch_does() -> None:
    spawn(body_rounding, 2, timeout=100)


def chain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))


def outputs(model: nn.Module, step: int, rank: int) -> list[torch.Tensor]:
    return [model(data(step, 10 * part + rank)).square().mean() for part in range(3)]


def body_more_calls(rank: int, world: int) -> None:
    """Check that a group handed over after its reduction raises on all ranks, and that the next step works."""
    model = chain()
    sharded(model, *model)
    handle = commhooks.attach(model, "allreduce", timeout=20)
    for step in range(4):
        model.zero_grad()
        if step < 2:
            model(data(step, rank)).square().mean().backward()
            continue
        early = [model(data(step, 10 * part + rank)).square().mean() for part in range(2)]
        early[0].backward()  # FSDP2 forgets all counts of uses here, also for early[1]
        late = early[1] + model(data(step, 20 + rank)).square().mean()
        if step == 2 and torch.__version__ >= "2.11":  # torch 2.10 keeps them
            with pytest.raises(HookResultError, match=r"handed over the gradient of .* after it had been reduced"):
                late.backward()
            continue
        late.backward()
        ref = chain()
        sum(sum(outputs(ref, step, other)) / world for other in range(world)).backward()
        for name, p in ref.named_parameters():
            torch.testing.assert_close(grads(model)[name], p.grad, msg=f"{step} {name}")
    assert handle.stats()["steps"] == 6


def test_a_group_that_comes_again_is_an_error_after_the_backward() -> None:
    spawn(body_more_calls, 2, timeout=100)


def body_open(rank: int, world: int) -> None:
    """With a manual end of the backward, a forward in between ends no step."""
    if not hasattr(FSDPModule, "set_manual_backward_finalization"):  # from torch 2.15 on
        return
    found = []
    for ours in (True, False):
        model = chain()
        sharded(model, *model)
        model.set_manual_backward_finalization(True)
        handle = commhooks.attach(model, "allreduce", timeout=20) if ours else None
        for step in range(0, 4, 2):
            model.zero_grad()
            # In torch's own run, each shard has one rank, which sees all replicas' batches.
            for part in (step, step + 1):
                ranks = [rank] if ours else range(world)
                (sum(model(data(part, r)).square().sum() for r in ranks) / len(ranks)).backward()
            model.finalize_backward()
            if ours:
                assert handle.stats()["steps"] == step // 2 + 1
        found.append(grads(model))
    for name, grad in found[1].items():
        torch.testing.assert_close(found[0][name], grad, msg=name)


def test_a_forward_before_the_end_by_hand_ends_nothing() -> None:
    spawn(body_open, 2, timeout=100)


def body_undecided(rank: int, world: int) -> None:
    """Without a known dtype FSDP2 itself would raise in the middle of the first backward."""
    if not hasattr(torch.empty(0), "grad_dtype") or not hasattr(FSDPModule, "set_manual_backward_finalization"):
        return  # before torch 2.15 there is no manual end
    for policy in (MixedPrecisionPolicy(), MixedPrecisionPolicy(reduce_dtype=torch.float32)):
        model = chain()
        model[1].weight.grad_dtype = None
        sharded(model, *model, mp_policy=policy)
        if policy.reduce_dtype is None:
            with pytest.raises(HookNotSupportedError, match=r"1: 1\.weight have grad_dtype=None.*reduce_dtype"):
                commhooks.attach(model, "allreduce", timeout=20)
            continue
        commhooks.attach(model, "allreduce", timeout=20)
        model(data(0, rank)).square().mean().backward()
        same_everywhere(model)


def test_gradients_of_no_known_dtype_are_refused() -> None:
    spawn(body_undecided, 2, timeout=100)
