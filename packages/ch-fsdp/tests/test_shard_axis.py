"""FSDP2's shard axis on gloo, compared with torch's own reduce-scatter."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

import commhooks
from ch_fsdp.torch_internals.param_groups import param_groups
from ch_testing import spawn
from commhooks import HookResultError, RemoteHookError

from .fsdp_kit import batch, distance, flat_params, gpt, grads, line, one_backward, shard2, single, square, train

pytestmark = [pytest.mark.timeout(180), pytest.mark.gloo]

STEPS = 4
BF16 = torch.bfloat16


def unsharded_bytes(world: int, itemsize: int) -> int:
    """Return the bytes of one step's reduce-scatters, with each parameter padded along dim 0."""
    shapes = [tuple(p.shape) for p in gpt().parameters()]
    return sum(-(-s[0] // world) * world * (s[1] if len(s) > 1 else 1) for s in shapes) * itemsize


def body_names(rank: int, world: int) -> list[tuple[str, float]]:
    mesh = line(world)
    exact = one_backward(shard2(gpt(), mesh), rank)
    found = []
    for name in (
        "allreduce",
        "fp16_compress",
        "bf16_compress",
        "bf16_compress(accumulate='fp32')",
    ):
        model = shard2(gpt(), mesh)
        handle = commhooks.attach(model, name, axis="shard")
        found.append((name, distance(one_backward(model, rank), exact)))
        handle.assert_active()
        stats = handle.stats()
        expected = unsharded_bytes(world, 4 if name == "allreduce" else 2)
        assert stats["shard_payload_bytes"] == stats["payload_bytes"] == expected == handle.payload_per_step(), name
        status = 4 * (world + 1) * 2 * (world - 1) / world  # round a ring
        assert stats["wire_bytes"] == expected * (world - 1) / world + status
        assert stats["rounds"] == 3  # two blocks and the rest
        assert stats["compressed_steps"] == (name != "allreduce")
        handle.detach()
        assert distance(one_backward(model, rank), exact) == 0
        commhooks.attach(model, "bf16_compress")  # no replicas: the shard axis
    by_function = shard2(gpt(), mesh)
    commhooks.attach(by_function, commhooks.get("reduce_scatter", kind="fsdp"))
    assert distance(one_backward(by_function, rank), exact) == 0
    return found


@pytest.mark.full
@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.soak), pytest.param(4, marks=pytest.mark.soak)])
def test_names(world: int) -> None:
    limit = {"allreduce": 0.0, "fp16_compress": 2e-3, "bf16_compress": 1e-2}
    for result in spawn(body_names, world, timeout=150):
        for name, error in result:
            assert error <= limit[name.split("(")[0]], name
            assert name == "allreduce" or error > 0


def body_trains(rank: int, world: int) -> list[tuple[list[float], torch.Tensor]]:
    out = []
    for name in ("allreduce", "bf16_compress(accumulate='fp32')"):
        model = shard2(gpt(), line(world))
        commhooks.attach(model, name)
        out.append((train(model, STEPS, rank), flat_params(model)))
    return out


@pytest.mark.full
@pytest.mark.parametrize("world", [4, pytest.param(2, marks=pytest.mark.soak)])
def test_trains_as_one_process_does(world: int) -> None:
    model, losses = single(STEPS, world)
    for (plain_losses, plain), (half_losses, half) in spawn(body_trains, world):
        assert plain_losses == pytest.approx(losses, abs=1e-6)
        torch.testing.assert_close(plain, flat_params(model), atol=1e-6, rtol=0)
        assert half_losses == pytest.approx(losses, rel=1e-3)
        assert 0 < (half - flat_params(model)).norm() / plain.norm() < 1e-3


def with_factor(model: Any) -> None:
    for module in [model, *model.blocks]:
        module.set_gradient_divide_factor(8.0)


def with_sums(model: Any) -> None:
    for module in [model, *model.blocks]:
        module.set_force_sum_reduction_for_comms(True)


def with_both(model: Any) -> None:
    with_factor(model)
    with_sums(model)


def freeze(model: Any) -> None:
    model.symbol.weight.requires_grad_(False)
    for p in model.blocks[0].parameters():
        p.requires_grad_(False)


def body_policies(rank: int, world: int) -> dict[str, float]:
    """Compare divide factors, sums, precision policies, offload and frozen parameters with torch without a hook."""
    mesh, found = line(world), {}

    def pair(case: str, name: str, setup: Callable[[Any], None] = lambda m: None, **options: Any) -> None:
        mine, torchs = (shard2(gpt(), mesh, **options) for _ in range(2))
        for model in (mine, torchs):
            setup(model)
        handle = commhooks.attach(mine, name)
        found[f"{case} {name}"] = distance(one_backward(mine, rank), one_backward(torchs, rank))
        assert handle.stats()["steps"] == 1

    for name in ("allreduce", "bf16_compress"):
        pair("sums", name, with_sums)
        pair("frozen", name, freeze)
        pair("reduce in bf16", name, mp_policy=MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=BF16))
        pair("reduce in fp32", name, mp_policy=MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32))
        pair("offload", name, offload_policy=CPUOffloadPolicy(pin_memory=False))
    pair("reduce in fp16", "allreduce", mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float16))
    # torch's own PREMUL_SUM fails on gloo, so compare with scaled gradients.
    exact = one_backward(shard2(gpt(), mesh), rank)
    for case, setup in (("factor", with_factor), ("factor and sums", with_both)):
        for name in ("allreduce", "bf16_compress"):
            model = shard2(gpt(), mesh)
            setup(model)
            commhooks.attach(model, name)
            got = {k: v * 8.0 / world for k, v in one_backward(model, rank).items()}
            found[f"{case} {name}"] = distance(got, exact)
    return found


@pytest.mark.full
def test_factors_precision_offload_frozen() -> None:
    for found in spawn(body_policies, 2, timeout=120):
        for case, error in found.items():
            same = case.endswith("allreduce") or "reduce in bf16" in case
            assert error <= (1e-6 if "factor" in case else 0.0) if same else 0 < error < 1e-2, (case, error)


def body_accumulation(rank: int, world: int) -> None:
    """Accumulate gradients with several parameter groups in one module."""
    mesh = line(world)
    mine, torchs = shard2(gpt(), mesh), shard2(gpt(), mesh)
    handle = commhooks.attach(mine, "allreduce")
    for model in (mine, torchs):
        model.set_requires_gradient_sync(False)
        model(*batch(1, rank)).backward()
    assert handle.stats()["steps"] == 0
    for model in (mine, torchs):
        model.set_requires_gradient_sync(True)
        model(*batch(2, rank)).backward()
        model(*batch(3, rank)).backward()  # adds to the sharded gradient
    assert distance(grads(mine), grads(torchs)) == 0
    assert handle.stats()["steps"] == 2
    body_shard_dim_1(rank, world)


def body_separate_group(rank: int, world: int) -> None:
    """Set and remove a separate process group for the reduce-scatters while a handle is attached."""
    model = shard2(gpt(), line(world))
    if not hasattr(model, "set_separate_reduce_scatter_group"):  # torch before 2.13
        return
    handle = commhooks.attach(model, "bf16_compress")
    first = one_backward(model, rank)
    for enabled, step in ((True, 2), (False, 3)):
        model.set_separate_reduce_scatter_group(enabled)
        assert distance(one_backward(model, rank), first) == 0
        shards = handle.binding.groups[0].shard_group
        assert (shards.group_name == line_group(model)) != enabled, "nothing was separated: this test proves nothing"
        assert handle.binding.engine.transport.group.group_name == shards.group_name
        stats = handle.stats()
        assert stats["steps"] == stats["compressed_steps"] == step
        assert stats["rounds"] == 3 * step
    handle.detach()
    assert 0 < distance(one_backward(model, rank), first) < 1e-2


def line_group(model: Any) -> str:
    """Return the name of the group over which the parameters are gathered."""
    return str(next(model.parameters()).device_mesh.get_group().group_name)


def body_hsdp_mesh(rank: int, world: int) -> None:
    """On a 2-D mesh torch itself all-reduces. The shard axis can still be compressed."""
    mine, torchs = shard2(gpt(), square()), shard2(gpt(), square())
    handle = commhooks.attach(mine, "allreduce", axis="shard")
    assert distance(one_backward(mine, rank), one_backward(torchs, rank)) == 0
    handle.detach()
    commhooks.attach(mine, "bf16_compress(accumulate='fp32')", axis="shard")
    assert 0 < distance(one_backward(mine, rank), one_backward(torchs, rank)) < 1e-2


def body_shard_dim_1(rank: int, world: int) -> None:
    """Shard parameters along another dimension than the first."""
    models = []
    for _ in range(2):
        model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False))
        torch.manual_seed(1)
        for p in model.parameters():
            nn.init.normal_(p)
        models.append(fully_shard(model, mesh=line(world), shard_placement_fn=lambda p: Shard(1)))
    commhooks.attach(models[0], "allreduce")
    x = torch.full((3, 8), float(rank + 1))
    for model in models:
        model(x).sum().backward()
    assert distance(grads(models[0]), grads(models[1])) == 0


class Experts(nn.Module):
    """Three parameters of one size, of which each rank uses others."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.each = nn.ModuleList(nn.Linear(256, 256, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor, used: tuple[int, ...]) -> torch.Tensor:
        return sum(self.each[k](x) for k in used).square().mean()  # type: ignore[union-attr]


HOOKS = ("allreduce", "bf16_compress", "bf16_compress(accumulate='fp32')", "quant8")


def body_experts(rank: int, world: int) -> None:
    """Parameters without a gradient on some ranks count as zeros, as between replicas."""
    if not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):  # torch 2.10
        return
    x = [torch.randn(8, 256, generator=torch.Generator().manual_seed(other)) for other in range(world)]
    for hook in HOOKS:
        model = fully_shard(Experts(), mesh=line(world))
        handle = commhooks.attach(model, hook)
        for first in ((0,), (0, 1), (0, 1, 2)):  # of rank 0; the others use the last one
            used = [first, *[(2,)] * (world - 1)]
            model.zero_grad()
            model(x[rank], used[rank]).backward()
            wanted = {name: torch.zeros(256, 256) for name, _ in model.named_parameters()}
            for given, which in zip(x, used, strict=True):
                alone = Experts()
                alone(given, which).backward()
                for name, p in alone.named_parameters():
                    wanted[name] += p.grad / world if p.grad is not None else 0
            for name, grad in grads(model).items():
                assert float((grad - wanted[name]).norm()) <= 1e-2 * float(wanted[name].norm()), (hook, first, name)
        handle.detach()
        assert not any(group.includes_unused for group in param_groups(model))


def body_short(rank: int, world: int) -> None:
    """All ranks raise, and none waits, if torch leaves parameters without a gradient out, as torch 2.10 does."""
    for hook in HOOKS:
        model = fully_shard(Experts(), mesh=line(world))
        handle = commhooks.attach(model, hook, timeout=20)
        for group in param_groups(model):
            group.includes_unused = False
        for used in ((0,) if rank == 0 else (2,), (0, 1, 2) if rank == 0 else (2,)):
            with pytest.raises(
                HookResultError if rank or len(used) == 1 else RemoteHookError, match="some had no gradient"
            ):
                model(torch.ones(2, 256), used).backward()
        model.zero_grad()
        model(torch.ones(2, 256), (0, 1, 2)).backward()
        handle.assert_active()


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.full)])
def test_parameters_that_some_ranks_do_not_use(world: int) -> None:
    spawn(body_experts, world, timeout=120)


def test_a_torch_that_leaves_unused_parameters_out() -> None:
    spawn(body_short, 2, timeout=120)


def test_accumulation_and_other_placements() -> None:
    spawn(body_accumulation, 2)


def test_separate_reduce_scatter_group_after_attach() -> None:
    spawn(body_separate_group, 2)


def test_shard_axis_of_a_2d_mesh() -> None:
    spawn(body_hsdp_mesh, 4)
