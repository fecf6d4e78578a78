"""Quantized reductions on FSDP2's shard axis, with and without another bit width on the replicate axis."""

import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint

import commhooks
from ch_testing import spawn
from commhooks import HookNotSupportedError, StateError
from commhooks.checkpoint import dcp

from .fsdp_kit import batch, distance, flat_params, gpt, line, one_backward, shard2, square, train

pytest.importorskip("ch_quant")
pytestmark = [pytest.mark.timeout(180), pytest.mark.gloo]

FOUR = "quant4(block=16, error_feedback=True)"
BF16 = torch.bfloat16


def body_near(rank: int, world: int) -> None:
    """Check error and bytes of each bit width on uneven shards (65 rows, 33 rows)."""
    mesh = line(world)
    exact = one_backward(shard2(gpt(), mesh), rank)
    for name, limit, share in (
        ("quant8(block=16)", 1e-2, 0.36),
        ("quant4(block=16)", 1.2e-1, 0.24),
        ("quant4(block=16, exempt=False)", 1.2e-1, 0.17),
        ("warmup(quant4(block=16), steps=1)", 1e-6, 1.0),
        ("policy({'*.qkv.*': quant8(block=16), '*': bf16_compress})", 1e-2, 0.5),
    ):
        model = shard2(gpt(), mesh)
        handle = commhooks.attach(model, name)
        found = one_backward(model, rank)
        assert distance(found, exact) <= limit, name
        stats = handle.stats()
        whole = sum(group.unsharded_numel() for group in handle.binding.groups) * 4
        assert stats["shard_payload_bytes"] <= share * whole, (name, stats["shard_payload_bytes"] / whole)
        assert (stats["compressed_steps"] == 1) == (limit > 1e-6)
        for n, p in model.named_parameters():
            assert p.grad is not None, n
        handle.detach()
        assert distance(one_backward(model, rank), exact) == 0


def body_feedback(rank: int, world: int) -> None:
    """Check that residuals arrive: the mean of the applied gradients approaches the exact gradient."""
    mesh = line(world)
    exact = one_backward(shard2(gpt(), mesh), rank)
    model = shard2(gpt(), mesh)
    handle = commhooks.attach(model, FOUR)
    once = one_backward(model, rank)
    total = {name: g.clone() for name, g in once.items()}
    for _ in range(31):  # a step sends a quarter of the residual, so about four steps of it are still due
        for name, g in one_backward(model, rank).items():
            total[name] += g
    assert distance({name: g / 32 for name, g in total.items()}, exact) < distance(once, exact) / 4
    handle.commit()
    shapes = {name: tuple(t.shape) for name, field, t in handle.state.entries() if field == "residual"}
    own = {name: p.shape for name, p in model.named_parameters()}
    assert shapes
    assert all(shape == tuple(own[name]) for name, shape in shapes.items()), "whole parameters, on every rank"


def body_cases(rank: int, world: int) -> None:
    """Check mixed precision, sums and factors, another dimension, and unused or frozen parameters."""
    mesh = line(world)

    def pair(case: str, setup: Any = lambda m: None, made: Any = None, limit: float = 2e-2, **options: Any) -> None:
        mine, torchs = ((made or (lambda: shard2(gpt(), mesh, **options)))() for _ in range(2))
        for model in (mine, torchs):
            setup(model)
        handle = commhooks.attach(mine, "quant8(block=16, error_feedback=True)")
        for step in (1, 2):
            a, b = one_backward(mine, rank, step), one_backward(torchs, rank, step)
            assert 0 < distance(a, b) < limit, case
        assert handle.stats()["compressed_steps"] == 2, case

    pair("reduce in bf16", mp_policy=MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=BF16))
    pair("reduce in fp32", mp_policy=MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32))
    pair("reduce in fp16", mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float16))
    pair("sums", lambda m: [x.set_force_sum_reduction_for_comms(True) for x in (m, *m.blocks)])
    pair("frozen", lambda m: [p.requires_grad_(False) for p in m.blocks[0].parameters()])

    def another() -> Any:
        placed = lambda p: Shard(1) if p.ndim == 2 and p.shape[1] % world == 0 else None  # noqa: E731
        return shard2(gpt(), mesh, shard_placement_fn=placed)

    pair("another dimension", made=another)


def body_unused(rank: int, world: int) -> None:
    # torch 2.10 lacks the option, so the hook refuses a short shard
    if not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
        return

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.a, self.b = nn.Linear(32, 32), nn.Linear(32, 32)

        def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
            return self.b(self.a(x)) if both else self.a(x)

    model = fully_shard(Two(), mesh=line(world))
    handle = commhooks.attach(model, "quant8(block=16)")
    for both in (True, False, True):
        model.zero_grad()
        model(torch.ones(2, 32), both).sum().backward()
        assert model.a.weight.grad is not None
    assert handle.stats()["steps"] == 3


class Shared(nn.Module):
    """One block that a forward may use several times."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.block, self.out = nn.Linear(32, 32, bias=False), nn.Linear(32, 4, bias=False)

    def forward(self, x: torch.Tensor, uses: int = 2, nested: bool = False, whole: bool = True) -> torch.Tensor:
        for _ in range(uses):
            x = torch.tanh(checkpoint(self.block, x, use_reentrant=False) if nested else self.block(x))
        return self.out(x) if whole else x


def twice(model: Shared, x: torch.Tensor) -> None:
    model(x).square().mean().backward()


def more_and_more(model: Shared, x: torch.Tensor) -> None:
    uses = 1 + int(x.abs().sum()) % 3  # `x` is the same on all ranks
    model(x, uses).square().mean().backward()


def two_forwards(model: Shared, x: torch.Tensor) -> None:
    (model(x, 1) * model(x + 1, 1)).square().mean().backward()


def recomputed(model: Shared, x: torch.Tensor) -> None:
    model(x, nested=True).square().mean().backward()


def in_chunks(model: Shared, x: torch.Tensor) -> None:
    """Run one backward for each part of the loss, then one through the block."""
    body = model(x, whole=False)
    cut = body.detach().requires_grad_()
    for part in cut.chunk(3):
        model.out(part).square().mean().div(3).backward()
    body.backward(cut.grad)


def accumulated(model: Shared, x: torch.Tensor) -> None:
    for part in x.chunk(2):
        model(part).square().mean().backward()


def body_conserved(rank: int, world: int, mesh: DeviceMesh, expr: str) -> None:
    """Reduce a block several times in a step. Applied gradients plus residuals equal the sum of all gradients."""
    for way in (twice, more_and_more, two_forwards, recomputed, in_chunks, accumulated):
        made = []
        for _ in range(2):
            model = Shared()
            fully_shard(model.block, mesh=mesh)
            if way is in_chunks:
                fully_shard(model.out, mesh=mesh)
            made.append(fully_shard(model, mesh=mesh))
        handle = commhooks.attach(made[0], expr, axis="shard")
        total = [0.0, 0.0]
        for step in range(6):
            same = torch.randn(6, 32, generator=torch.Generator().manual_seed(step))
            for at, model in enumerate(made):
                model.zero_grad()
                way(model, same * (rank + 1) if way is not more_and_more else same)
                total[at] = total[at] + model.block.weight.grad.full_tensor()
        handle.commit()
        residual = handle.state.draft.newest()["block.weight", "residual"].numbers().view(32, 32).clone()
        assert residual.any()
        dist.all_reduce(residual)
        torch.testing.assert_close(total[0] + residual / world, total[1], atol=1e-6, rtol=1e-4, msg=way.__name__)


def body_conserved_on_two(rank: int, world: int) -> None:
    for expr in (FOUR, "sign(block=16)"):
        body_conserved(rank, world, line(world), expr)


def body_conserved_between_replicas(rank: int, world: int) -> None:
    body_conserved(rank, world, square(), FOUR)


def body_refused(rank: int, world: int) -> None:
    model = shard2(gpt(), line(world))
    for hook in ("powersgd(rank=2)", "error_feedback(bf16_compress)", "warmup(powersgd(rank=2), steps=3)"):
        with pytest.raises(HookNotSupportedError, match=r"has no run_scatter\(\)"):
            commhooks.attach(model, hook, axis="shard")


def test_near_the_average_with_the_bytes_promised() -> None:
    spawn(body_near, 2)


@pytest.mark.soak
def test_near_the_average_on_three() -> None:
    spawn(body_near, 3)


@pytest.mark.full
def test_feedback_on_uneven_shards() -> None:
    spawn(body_feedback, 3)


def test_cases() -> None:
    spawn(body_cases, 2)


@pytest.mark.full
def test_units_reduced_several_times_in_a_step() -> None:
    spawn(body_conserved_on_two, 2)


@pytest.mark.full
def test_units_reduced_several_times_in_a_step_of_a_2d_mesh() -> None:
    spawn(body_conserved_between_replicas, 4)


def test_unused_parameters_and_refusals() -> None:
    spawn(body_unused, 2)
    spawn(body_refused, 2)


# -- both axes


def attached(model: nn.Module, shard: str, replicate: str) -> tuple[Any, Any]:
    return commhooks.attach(model, shard, axis="shard"), commhooks.attach(model, replicate, axis="replicate")


def steps(model: nn.Module, handles: Any, optimizer: torch.optim.Optimizer, rank: int, first: int, last: int) -> None:
    for step in range(first, last):
        optimizer.zero_grad()
        model(*batch(step, rank)).backward()
        optimizer.step()


def body_both_axes(rank: int, world: int) -> tuple[list[float], list[float], dict[str, float]]:
    """Use 8 bits inside the node and 4 between nodes. A saved and resumed run has the same bits."""
    exact = shard2(gpt(), square())
    plain = train(exact, 12, rank)
    model = shard2(gpt(), square())
    shard, replicate = attached(model, "quant8(block=16)", FOUR)
    found = train(model, 12, rank)
    both = {"shard": shard.stats()["shard_payload_bytes"], "replicate": replicate.stats()["replicate_payload_bytes"]}
    assert set(shard.stats()) & {"replicate_payload_bytes"} == set()
    shard.assert_active()
    replicate.assert_active()
    replicate.detach()
    shard.detach()
    return plain, found, both


def body_resume(rank: int, world: int) -> None:
    straight = shard2(gpt(), square())
    handles = attached(straight, FOUR, FOUR)
    optimizer = torch.optim.SGD(straight.parameters(), lr=0.1)
    steps(straight, handles, optimizer, rank, 0, 3)
    files = []
    for handle in handles:
        files.append(io.BytesIO())
        torch.save(handle.state_dict(), files[-1])
        files[-1].seek(0)
    weights = {name: p.detach().clone() for name, p in straight.state_dict().items()}
    steps(straight, handles, optimizer, rank, 3, 6)

    again = shard2(gpt(seed=1), square())
    resumed = attached(again, FOUR, FOUR)
    again.load_state_dict(weights)
    for handle, file in zip(resumed, files, strict=True):
        handle.load_state_dict(torch.load(file, weights_only=True))
    steps(again, resumed, torch.optim.SGD(again.parameters(), lr=0.1), rank, 3, 6)
    assert torch.equal(flat_params(again), flat_params(straight))
    saved = resumed[0].state_dict()
    with pytest.raises(StateError, match=r"rank \d of 2, this is rank \d of 2"):
        resumed[0].load_state_dict({**saved, "rank": 1 - saved["rank"]})


def body_other_count(rank: int, world: int) -> None:
    """Resume a merged state of three shards over two shards. Residuals belong to whole parameters."""
    model = shard2(gpt(), line(world))
    handle = commhooks.attach(model, FOUR)
    one_backward(model, rank)
    everyone: list[Any] = [None] * world
    dist.all_gather_object(everyone, handle.state_dict())
    merged = commhooks.checkpoint.merge(everyone)
    pair = dist.new_group([0, 1])
    if rank < 2:
        two = shard2(gpt(), DeviceMesh.from_group(pair, torch.get_default_device().type))
        fewer = commhooks.attach(two, FOUR, axis="shard")
        with pytest.raises(StateError, match="world_change='mean'"):
            fewer.load_state_dict(merged)
        fewer.load_state_dict(merged, world_change="mean")
        held = {name: t for name, _, t in fewer.state.entries()}
        assert all(torch.equal(held[name].cpu(), entry["residual"].cpu()) for name, entry in merged["entries"].items())
        one_backward(two, rank)
        fewer.detach()
    dist.barrier()


def body_dcp(rank: int, world: int, folder: str) -> None:
    """Save one distributed checkpoint with a key for each replica, and check that every rank gets its part back."""
    model = shard2(gpt(), square())
    handle = commhooks.attach(model, FOUR, axis="shard")
    one_backward(model, rank)
    with pytest.raises(StateError, match="key="):
        dcp.sharded(handle)
    replica = model.blocks[0].qkv.weight.device_mesh.get_local_rank("replicate")
    dcp.save(handle, folder, key=f"replica_{replica}")
    held = {name: t.clone() for name, _, t in handle.state.entries()}
    one_backward(model, rank, 78)
    dcp.load(handle, folder, key=f"replica_{replica}")
    assert held
    assert all(torch.equal(t, held[name]) for name, _, t in handle.state.entries())


@pytest.mark.full
def test_one_distributed_checkpoint(tmp_path: Path) -> None:
    spawn(body_dcp, 4, str(tmp_path), timeout=150)


@pytest.mark.full
def test_both_axes_with_other_bits() -> None:
    for plain, found, both in spawn(body_both_axes, 4, timeout=150):
        assert sum(found) == pytest.approx(sum(plain), rel=1e-2)
        assert found[-1] == pytest.approx(plain[-1], rel=3e-2)
        assert 0 < both["replicate"] < both["shard"]


@pytest.mark.full
def test_saved_and_resumed_to_the_same_bits() -> None:
    spawn(body_resume, 4, timeout=150)


def test_another_number_of_shards() -> None:
    spawn(body_other_count, 3, timeout=150)
