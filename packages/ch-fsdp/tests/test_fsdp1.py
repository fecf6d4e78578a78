"""FSDP1's hook functions on gloo, as `register_comm_hook` calls them."""

import itertools
import math
import pickle
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
from ch_testing import spawn

from .fsdp_kit import batch, gpt, shard1, single, train

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.gloo,
    pytest.mark.filterwarnings("ignore:The `NO_SHARD` sharding strategy:FutureWarning"),
]

STEPS = 4
HALF = {"fp16_compress": torch.float16, "bf16_compress": torch.bfloat16}
ROUNDING = {"fp16_compress": 2e-3, "bf16_compress": 2e-2}


def wrapped(strategy: str, **options: Any) -> FSDP:
    return shard1(gpt(), ShardingStrategy[strategy], **options)


def local_grads(model: nn.Module, rank: int) -> torch.Tensor:
    """Return this rank's gradients of one backward as one vector."""
    model.zero_grad()
    model(*batch(77, rank)).backward()
    return torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])


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


def body_averages(rank: int, world: int) -> None:
    """Shards of any size. Inf of one rank arrives and leaves no trace. Pickled functions and states average as before."""
    group = dist.group.WORLD
    assert group is not None
    for spec in commhooks.list_hooks(kind="fsdp"):
        hook, state = pickle.loads(pickle.dumps((commhooks.get(spec.id, "fsdp"), ch_fsdp.LowPrecisionState(group))))
        for whole, n in itertools.product((True, False), (7, 64, 1 << 14)):
            if (spec.name == "allreduce" and not whole) or (spec.name == "reduce_scatter" and whole):
                continue
            every = torch.randn(world, world * n, generator=torch.Generator().manual_seed(n))
            for number in (math.inf, 1.0):
                grad, output = number * every[rank] if rank == 1 else every[rank].clone(), torch.empty(n)
                hook(state, grad) if whole else hook(state, grad, output)
                found, exact = grad if whole else output, every.double().mean(0)
                if number == 1.0:
                    exact = exact if whole else exact.chunk(world)[rank]
                    assert (found - exact).norm() <= ROUNDING.get(spec.name, 1e-6) * exact.norm(), (spec.name, n)
                    assert found.dtype == torch.float32
                else:
                    assert not found.isfinite().any(), (spec.name, n)


def test_averages_of_every_hook_and_size() -> None:
    spawn(body_averages, 2, timeout=100)


def hooked(hook: Any, **options: Any) -> FSDP:
    model = wrapped("FULL_SHARD", **options)
    model.register_comm_hook(ch_fsdp.LowPrecisionState(dist.group.WORLD), hook)
    return model


def body_training(rank: int, world: int) -> None:
    """A gradient of 16 bits is sent without a cast. no_sync accumulates. Training has the losses of one process."""
    policy = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    a, b = wrapped("FULL_SHARD", mixed_precision=policy), wrapped("FULL_SHARD", mixed_precision=policy)
    b.register_comm_hook(ch_fsdp.DefaultState(dist.group.WORLD), ch_fsdp.bf16_compress_hook)
    assert torch.equal(local_grads(a, rank), local_grads(b, rank))
    c, d = hooked(ch_fsdp.reduce_scatter_hook), wrapped("FULL_SHARD")
    for model in (c, d):
        with model.no_sync():
            model(*batch(1, rank)).backward()
        model(*batch(2, rank)).backward()
    for p, q in zip(c.parameters(), d.parameters(), strict=True):
        assert (p.grad is None and q.grad is None) or torch.equal(p.grad, q.grad)
    losses = single(STEPS, world)[1]
    assert train(hooked(ch_fsdp.reduce_scatter_hook), STEPS, rank) == pytest.approx(losses, abs=1e-6)
    assert train(hooked(ch_fsdp.bf16_compress_hook), STEPS, rank) == pytest.approx(losses, rel=1e-3)


def test_training_mixed_precision_and_no_sync() -> None:
    spawn(body_training, 2)
