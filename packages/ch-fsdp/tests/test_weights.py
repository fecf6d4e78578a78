"""Weighted averages of FSDP2 models: equal to one process on the concatenated batch."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate

import commhooks
from ch_testing import spawn
from commhooks import HookConfigError, HookNotSupportedError

from .fsdp_kit import batch, distance, gpt, grads, line, shard2, square

pytestmark = [pytest.mark.timeout(180), pytest.mark.gloo]

SIZES = [5, 1, 3, 2]  # sequences of each rank


def one_process(world: int, seeds: range = range(1)) -> dict[str, torch.Tensor]:
    parts = [batch(seed, rank, SIZES[rank]) for seed in seeds for rank in range(world)]
    model = gpt()
    model(*(torch.cat(some) for some in zip(*parts, strict=True))).backward()
    return grads(model)


def sharded(world: int) -> nn.Module:
    return shard2(gpt(), line(world))  # type: ignore[return-value]


def replicated(world: int) -> nn.Module:
    model = gpt()
    for block in model.blocks:
        replicate(block, mesh=line(world))
    return replicate(model, mesh=line(world))  # type: ignore[no-any-return]


CASES: list[tuple[str, Callable[[int], nn.Module], float]] = [
    ("allreduce", sharded, 1e-6),
    ("bf16_compress(accumulate='fp32')", sharded, 2e-2),
    ("quant8", sharded, 5e-2),
    ("allreduce", replicated, 1e-6),
    ("quant8", replicated, 5e-2),
]


def steps(rank: int, world: int) -> list[list[float]]:
    found = []
    for name, wrapped, _ in CASES:
        model = wrapped(world)
        handle = commhooks.attach(model, name, weighted=True)
        errors = []
        for _ in range(2):
            model.zero_grad()
            handle.weigh(SIZES[rank])
            model(*batch(0, rank, SIZES[rank])).backward()
            errors.append(distance(grads(model), one_process(world)))
        assert handle.stats()["weight_skew"] == pytest.approx(max(SIZES[:world]) * world / sum(SIZES[:world]))
        found.append(errors)
    return found


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.full)])
def test_shards_and_replicas_equal_one_process(world: int) -> None:
    for found in spawn(steps, world, timeout=150):
        for (name, wrapped, bound), errors in zip(CASES, found, strict=True):
            assert max(errors) <= bound, (name, wrapped.__name__, errors)


def accumulated(rank: int, world: int) -> float:
    model = sharded(world)
    handle = commhooks.attach(model, "allreduce", weighted=True)
    for micro in range(3):
        model.set_requires_gradient_sync(micro == 2)  # type: ignore[operator]
        tokens = SIZES[rank] * 8
        handle.weigh(tokens, of="sum")
        (model(*batch(micro, rank, SIZES[rank])) * tokens).backward()
    return distance(grads(model), one_process(world, range(3)))


def test_weights_of_an_accumulation_add_up() -> None:
    assert max(spawn(accumulated, 2, timeout=100)) <= 1e-6


def refusal(model: Any, rank: int, kind: type[Exception]) -> str:
    """Return the text of the error that a backward raises."""
    with pytest.raises(kind) as raised:
        model(*batch(0, rank)).backward()
    return str(raised.value)


def late(rank: int, world: int) -> str:
    model: Any = sharded(world)
    handle = commhooks.attach(model, "allreduce", weighted=True)

    def weigh_late(module: nn.Module, args: Any, out: torch.Tensor) -> None:
        out.register_hook(lambda gradient: handle.weigh(2))

    model.symbol.register_forward_hook(weigh_late)
    handle.weigh(1)
    return refusal(model, rank, HookConfigError)


def test_a_weight_in_the_middle_of_a_step_is_an_error_on_all_ranks() -> None:
    assert all("weigh() was called after" in text for text in spawn(late, 2, timeout=100))


def refused(rank: int, world: int) -> None:
    meshed = shard2(gpt(), square())
    for hook in ("powersgd(rank=2)", "bf16_compress"):
        with pytest.raises(HookNotSupportedError, match="shards and replicas"):
            commhooks.attach(meshed, hook, weighted=True)
    model = sharded(world)
    with pytest.raises(HookNotSupportedError, match="weights, not gradients"):
        commhooks.attach(model, "quant8", axis="gather", weighted=True)
    for group in (model, *model.blocks):  # type: ignore[misc]
        group.set_gradient_divide_factor(1.0)
    with pytest.raises(HookNotSupportedError, match="set_gradient_divide_factor"):
        commhooks.attach(model, "allreduce", weighted=True)
    commhooks.attach(model, "allreduce")  # the model is still free


@pytest.mark.full
def test_models_that_cannot_be_weighed_are_refused() -> None:
    spawn(refused, 4, timeout=100)


def changed(rank: int, world: int) -> str:
    model = sharded(world)
    handle = commhooks.attach(model, "allreduce", weighted=True)
    for group in (model, *model.blocks):  # type: ignore[misc]
        group.set_gradient_divide_factor(1.0)
    handle.weigh(1)
    return refusal(model, rank, HookNotSupportedError)


def test_sums_that_are_set_after_attach_are_refused() -> None:
    assert all("set_gradient_divide_factor" in text for text in spawn(changed, 2, timeout=100))
