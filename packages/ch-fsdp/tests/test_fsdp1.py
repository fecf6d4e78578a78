"""FSDP1 on gloo: hooks by name and by PyTorch's signatures, under every sharding strategy."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._comm_hooks import default_hooks as torch_hooks
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy

import ch_fsdp
import commhooks
from commhooks.testing import spawn

from .fsdp_kit import batch, gpt, shard1, single, square, train

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.gloo,
    pytest.mark.filterwarnings("ignore:The `NO_SHARD` sharding strategy:FutureWarning"),
]

STEPS = 4
HALF = {"fp16_compress": torch.float16, "bf16_compress": torch.bfloat16}
ROUNDING = {"fp16_compress": 2e-3, "bf16_compress": 2e-2}


def wrapped(strategy: str, **options: Any) -> FSDP:
    if strategy.startswith(("HYBRID", "_HYBRID")):
        options["device_mesh"] = square()
    return shard1(gpt(), ShardingStrategy[strategy], **options)


def local_grads(model: nn.Module, rank: int) -> torch.Tensor:
    """Return this rank's gradients of one backward as one vector."""
    model.zero_grad()
    model(*batch(77, rank)).backward()
    return torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])


def full(model: FSDP) -> torch.Tensor:
    with FSDP.summon_full_params(model):
        return torch.cat([p.detach().reshape(-1).clone() for p in model.parameters()])


def padded(numel: int, world: int) -> int:
    return -(-numel // world) * world


def expected_bytes(name: str, strategy: str, world: int) -> int:
    """Return the payload of one step, computed from the shapes alone."""
    model = gpt()
    blocks = [sum(p.numel() for p in block.parameters()) for block in model.blocks]
    units = [sum(p.numel() for p in model.parameters()) - sum(blocks), *blocks]
    size = 4 if name in ("allreduce", "reduce_scatter") else 2
    if strategy == "NO_SHARD":
        return size * sum(units)
    shards = 2 if "HYBRID" in strategy else world
    inside = sum(padded(n, shards) for n in units)
    return size * (inside + (inside // shards if "HYBRID" in strategy else 0))


def body_by_name(rank: int, world: int, strategies: list[str]) -> list[tuple[str, str, float]]:
    """Check every name under every strategy: distance from plain FSDP1, traffic, and detach."""
    found = []
    for strategy in strategies:
        exact = local_grads(wrapped(strategy), rank)
        plain = "allreduce" if strategy == "NO_SHARD" else "reduce_scatter"
        for name in (plain, "fp16_compress", "bf16_compress", "bf16_compress(accumulate='fp32')"):
            model = wrapped(strategy)
            handle = commhooks.attach(model, name)
            found.append((name, strategy, float((local_grads(model, rank) - exact).norm() / exact.norm())))
            handle.assert_active()
            stats = handle.stats()
            if "fp32" not in name:
                assert stats["payload_bytes"] == expected_bytes(name, strategy, world), (name, strategy)
            assert stats["compressed_steps"] == (name != plain), (name, strategy)
            handle.detach()
            assert torch.equal(local_grads(model, rank), exact), (name, strategy)
    return found


@pytest.mark.parametrize(
    ("world", "strategies"),
    [
        (2, ["NO_SHARD", "SHARD_GRAD_OP"]),
        pytest.param(4, ["FULL_SHARD", "HYBRID_SHARD"], marks=pytest.mark.full),
        pytest.param(3, ["NO_SHARD", "SHARD_GRAD_OP", "FULL_SHARD"], marks=pytest.mark.soak),
        pytest.param(4, ["NO_SHARD", "SHARD_GRAD_OP", "_HYBRID_SHARD_ZERO2"], marks=pytest.mark.soak),
    ],
)
def test_names_fit_every_strategy(world: int, strategies: list[str]) -> None:
    for result in spawn(body_by_name, world, strategies, timeout=170):
        for name, strategy, error in result:
            short = name.split("(")[0]
            if short in HALF:
                assert 0 < error < ROUNDING[short], (name, strategy)
            else:
                assert error == 0, (name, strategy)


def body_trains(rank: int, world: int, strategy: str) -> tuple[list[float], torch.Tensor, list[float], torch.Tensor]:
    plain, half = wrapped(strategy), wrapped(strategy)
    commhooks.attach(plain, "allreduce")
    commhooks.attach(half, "bf16_compress(accumulate='fp32')")
    return train(plain, STEPS, rank), full(plain), train(half, STEPS, rank), full(half)


@pytest.mark.parametrize(
    ("world", "strategy"),
    [(2, "FULL_SHARD"), pytest.param(4, "HYBRID_SHARD", marks=pytest.mark.full)]
    + [pytest.param(4, s, marks=pytest.mark.soak) for s in ("NO_SHARD", "SHARD_GRAD_OP", "FULL_SHARD")],
)
def test_trains_as_one_process_does(world: int, strategy: str) -> None:
    model, losses = single(STEPS, world)
    params = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    for plain_losses, plain, half_losses, half in spawn(body_trains, world, strategy):
        assert plain_losses == pytest.approx(losses, abs=1e-6)
        torch.testing.assert_close(plain, params, atol=1e-6, rtol=0)
        assert half_losses == pytest.approx(losses, rel=1e-3)
        assert 0 < (half - params).norm() / params.norm() < 1e-3


def body_functions(rank: int, world: int) -> dict[str, float]:
    """Check PyTorch's form of registration, and compare it with MixedPrecision(reduce_dtype)."""
    errors = {}
    for name, dtype in HALF.items():
        for strategy in ("NO_SHARD", "FULL_SHARD"):
            options = {"use_orig_params": name == "fp16_compress"}
            mixed = wrapped(strategy, mixed_precision=MixedPrecision(reduce_dtype=dtype), **options)
            model = wrapped(strategy, **options)
            hook = commhooks.get(name, kind="fsdp")
            model.register_comm_hook(ch_fsdp.LowPrecisionState(dist.group.WORLD), hook)
            ours, torchs = local_grads(model, rank), local_grads(mixed, rank)
            assert ours.dtype == torch.float32
            errors[f"{name} {strategy}"] = float((ours - torchs).norm() / torchs.norm())
    for strategy, hook in (("NO_SHARD", ch_fsdp.allreduce_hook), ("SHARD_GRAD_OP", ch_fsdp.reduce_scatter_hook)):
        model = wrapped(strategy)
        model.register_comm_hook(ch_fsdp.DefaultState(dist.group.WORLD), hook)
        assert torch.equal(local_grads(model, rank), local_grads(wrapped(strategy), rank))
    # The hook divides before the cast, because each gradient and their sum exceed fp16's 65504.
    grad = torch.full((4,), 100_000.0)
    ch_fsdp.fp16_compress_hook(ch_fsdp.LowPrecisionState(dist.group.WORLD), grad)
    assert torch.equal(grad, torch.full((4,), 100_000.0)) or world != 4
    # Use PyTorch's own states, which support no weak references.
    every = torch.arange(2.0 * world)
    whole = every.clone()
    ch_fsdp.allreduce_hook(torch_hooks.DefaultState(dist.group.WORLD), whole)
    assert torch.equal(whole, every)
    theirs, part = torch_hooks.LowPrecisionState(dist.group.WORLD, parameter_type=torch.float64), torch.empty(2)
    ch_fsdp.bf16_compress_hook(theirs, every.clone(), part)
    assert part.dtype == torch.float64
    assert part.tolist() == [2.0 * rank, 2.0 * rank + 1]
    model = wrapped("FULL_SHARD")
    model.register_comm_hook(torch_hooks.LowPrecisionState(dist.group.WORLD), ch_fsdp.fp16_compress_hook)
    assert local_grads(model, rank).isfinite().all()
    assert ch_fsdp.DefaultState._get_gradient_predivide_factor(8) == 4.0
    low = ch_fsdp.LowPrecisionState(dist.group.WORLD, parameter_type=torch.float64)
    output = torch.empty(2)
    ch_fsdp.bf16_compress_hook(low, torch.arange(2.0 * world), output)
    assert output.dtype == torch.float64
    assert output.tolist() == [2.0 * rank, 2.0 * rank + 1]
    return errors


def test_pytorchs_signatures_match_its_mixed_precision() -> None:
    for errors in spawn(body_functions, 2, timeout=120):
        for case, error in errors.items():
            assert error < ROUNDING[case.split()[0]], case


def body_mixed_precision(rank: int, world: int) -> None:
    """A 16-bit parameter policy gives 16-bit gradients, which are sent without a cast. no_sync accumulates."""
    policy = MixedPrecision(param_dtype=torch.bfloat16)
    a, b = (wrapped("FULL_SHARD", mixed_precision=policy) for _ in range(2))
    handle = commhooks.attach(b, "bf16_compress")
    assert torch.equal(local_grads(a, rank), local_grads(b, rank))
    calls = handle.binding.calls
    c = wrapped("FULL_SHARD")
    commhooks.attach(c, "reduce_scatter")
    d = wrapped("FULL_SHARD")
    for model in (c, d):
        with model.no_sync():
            model(*batch(1, rank)).backward()
        model(*batch(2, rank)).backward()
    for p, q in zip(c.parameters(), d.parameters(), strict=True):
        assert (p.grad is None and q.grad is None) or torch.equal(p.grad, q.grad)
    assert calls == 3


def test_mixed_precision_and_no_sync() -> None:
    spawn(body_mixed_precision, 2)
