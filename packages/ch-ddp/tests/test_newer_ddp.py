"""Newer versions of torch: the caller finalises a backward, and buckets live for one backward."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ch_ddp
import commhooks
from ch_ddp.hook_function import as_hook
from ch_testing import spawn
from commhooks import Plain

pytestmark = [pytest.mark.timeout(150), pytest.mark.gloo]

by_hand = pytest.mark.skipif(
    not hasattr(DistributedDataParallel, "finalize_backward"), reason="finalize_backward() came with torch 2.15"
)
lazily = pytest.mark.skipif(
    "lazy_bucket_allocation" not in DistributedDataParallel.__init__.__annotations__
    and "lazy_bucket_allocation" not in DistributedDataParallel.__init__.__code__.co_varnames,
    reason="lazy_bucket_allocation came with torch 2.15",
)


class Fails(Plain):
    """Raises on rank 1 when armed."""

    name, armed = "fails", False

    def run(self, bucket: Any, ctx: Any) -> Any:
        if self.armed and ctx.rank == 1 and not bucket.buffer.is_meta:
            raise ArithmeticError("boom")
        yield from super().run(bucket, ctx)


def wrapped(**options: Any) -> DistributedDataParallel:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3))
    return DistributedDataParallel(net, bucket_cap_mb=0.0001, **options)


def backward(model: nn.Module, rank: int, step: int) -> None:
    model.zero_grad()
    torch.manual_seed(100 * step + rank)
    model(torch.randn(4, 8)).pow(2).sum().backward()


def gradients(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.reshape(-1) for p in model.parameters()])


def finalised_by_hand(rank: int, world: int) -> list[Any]:
    found: list[Any] = []
    for static in (False, True):
        plain, attached, bare, foreign = (wrapped(static_graph=static) for _ in range(4))
        commhooks.attach(attached, "allreduce")
        bare.register_comm_hook(None, ch_ddp.allreduce_hook)
        commhooks.attach(foreign, lambda state, bucket: ch_ddp.allreduce_hook(None, bucket))
        for model in (attached, bare, foreign):
            model.require_manual_backward_finalization = True
        for step in range(4):
            for model in (plain, attached, bare, foreign):
                backward(model, rank, step)
                if model is not plain:
                    model.finalize_backward()
            found += [torch.equal(gradients(plain), gradients(model)) for model in (attached, bare, foreign)]
    return found


@by_hand
def test_a_backward_that_is_finalised_by_hand_has_the_same_average() -> None:
    for found in spawn(finalised_by_hand, 2):
        assert found == [True] * 24


def fails_by_hand(rank: int, world: int) -> list[str]:
    model, reduction = wrapped(), Fails()
    commhooks.attach(model, reduction)
    model.require_manual_backward_finalization = True
    found = []
    for step in range(5):
        reduction.armed = step == 2
        try:
            backward(model, rank, step)
            model.finalize_backward()
            found.append("")
        except Exception as error:
            found.append(type(error).__name__)
    return found


@by_hand
def test_a_failed_backward_that_is_finalised_by_hand_leaves_the_model_usable() -> None:
    good, bad = spawn(fails_by_hand, 2)
    assert good == ["", "", "RemoteHookError", "", ""]
    assert bad == ["", "", "ArithmeticError", "", ""]


def fails_beside(rank: int, world: int, kind: str, failing: int) -> list[str]:
    """Run two models in one loss and fail in one. The error keeps the caller from finalising both."""
    towers, reductions = [wrapped(), wrapped()], [Fails(), Fails()]
    for model, reduction in zip(towers, reductions, strict=True):
        if kind == "attached":
            commhooks.attach(model, reduction)
        elif kind == "called by a function of the user's":
            commhooks.attach(model, partial(called, as_hook(reduction)))
        else:
            model.register_comm_hook(None, as_hook(reduction))
        model.require_manual_backward_finalization = True
    found = []
    for step in range(5):
        reductions[failing].armed = step == 2
        for model in towers:
            model.zero_grad()
        torch.manual_seed(100 * step + rank)
        x = torch.randn(4, 8)
        try:
            (towers[0](x) * towers[1](x)).pow(2).sum().backward()
            for model in towers:
                model.finalize_backward()
            mine = torch.cat([gradients(model) for model in towers])
            everyone = [torch.empty_like(mine) for _ in range(world)]
            torch.distributed.all_gather(everyone, mine)
            found.append("same" if torch.equal(*everyone) else "differ")
        except Exception as error:
            found.append(type(error).__name__)
    return found


def called(hook: Any, state: Any, bucket: torch.distributed.GradBucket) -> torch.futures.Future[torch.Tensor]:
    future: torch.futures.Future[torch.Tensor] = hook(None, bucket)
    return future


@by_hand
@pytest.mark.parametrize("kind", ["attached", "registered", "called by a function of the user's"])
@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_of_one_model_leaves_the_others_of_its_backward_usable(kind: str, failing: int) -> None:
    good, bad = spawn(fails_beside, 2, kind, failing)
    assert good == ["same", "same", "RemoteHookError", "same", "same"]
    assert bad == ["same", "same", "ArithmeticError", "same", "same"]


def freed(rank: int, world: int) -> tuple[bool, int]:
    model, plain = wrapped(lazy_bucket_allocation=True), wrapped()
    handle = commhooks.attach(model, "allreduce")
    for step in range(4):
        backward(model, rank, step)
        backward(plain, rank, step)
    engine = handle.binding.engine  # type: ignore[union-attr]
    return torch.equal(gradients(model), gradients(plain)), len(engine.step.kept)  # type: ignore[union-attr]


@lazily
def test_buckets_that_ddp_frees_are_not_kept() -> None:
    assert spawn(freed, 2) == [(True, 0)] * 2
