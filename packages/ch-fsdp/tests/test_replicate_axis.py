"""FSDP2's replicate axis on gloo: 2 shards x 2 replicas, and 2 replicas of an unsharded model."""

import io
from collections.abc import Generator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import ch_powersgd
import commhooks
from ch_fsdp.group_order import GroupOrder
from ch_testing import spawn
from commhooks import (
    AllReduce,
    AttachError,
    Bucket,
    HookConfigError,
    RankMismatchError,
    RemoteHookError,
    Requests,
    StateError,
    StepContext,
)

from .fsdp_kit import batch, flat_params, gpt, grads, shard2, single, square, train

pytestmark = [pytest.mark.timeout(280), pytest.mark.gloo]

STEPS = 4
POWERSGD = "powersgd(rank=2, min_compression_rate=1)"


def one_backward(model: nn.Module, rank: int, step: int = 77) -> torch.Tensor:
    model.zero_grad()
    model(*batch(step, rank)).backward()
    return torch.cat([g.reshape(-1) for g in grads(model).values()])


def inside(**options: Any) -> Any:
    """Return a GPT on this rank's row of the 2 x 2 mesh."""
    return shard2(gpt(), square()["shard"], **options)


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).double().norm() / b.double().norm())


def body_against_native(rank: int, world: int) -> None:
    """Compare with torch's own 2-D mesh, which averages over replicas itself, and derive bytes from the shapes."""
    native = one_backward(shard2(gpt(), square()), rank)
    shapes = [tuple(p.shape) for p in gpt().parameters()]
    padded = [-(-s[0] // 2) * (s[1] if len(s) > 1 else 1) for s in shapes]
    for name, limit in (
        ("allreduce", 0.0),
        ("bf16_compress", 2e-2),
        ("bf16_compress(accumulate='fp32')", 2e-2),
        (f"bf16_wrapper({POWERSGD})", 0.9),
    ):
        model = inside()
        handle = commhooks.attach(model, name)
        error = distance(one_backward(model, rank), native)
        assert error <= limit, (name, error)
        assert (error > 0) == (name != "allreduce"), name
        stats = handle.stats()
        assert stats["compressed_steps"] == (name != "allreduce")
        if name == "bf16_compress":
            assert stats["shard_payload_bytes"] == 2 * 2 * sum(padded)
            mine = sum(p._local_tensor.numel() for p in model.parameters())
            assert stats["replicate_payload_bytes"] == 2 * mine
            # A status on each axis, one more to relay it, and one agreement on the order of three groups.
            status, order = 3 * 4 * (2 + 1), 3 * 8
            assert stats["wire_bytes"] == 2 * sum(padded) + 2 * mine + status + order
        else:
            assert ("shard_payload_bytes" in stats) == name.startswith("bf16_compress")
        handle.detach()  # plain averaging between the replicas
        assert distance(one_backward(model, rank), native) == 0
    one_handle_per_axis(rank)


def one_handle_per_axis(rank: int) -> None:
    """Attach two handles, for the shard axis and the replicate axis."""
    model, native = inside(), shard2(gpt(), square())
    shard = commhooks.attach(model, "bf16_compress(accumulate='fp32')", axis="shard")
    between = commhooks.attach(model, "allreduce", axis="replicate")
    error = distance(one_backward(model, rank), one_backward(native, rank))
    assert shard.stats()["steps"] == between.stats()["steps"] == 1
    assert 0 < error < 1e-2


@pytest.mark.full
def test_names_against_torchs_own_mesh() -> None:
    spawn(body_against_native, 4, timeout=120)


def body_trains(rank: int, world: int, group: str) -> list[tuple[list[float], torch.Tensor]]:
    out = []
    for name in ("allreduce", "bf16_compress(accumulate='fp32')"):
        torch.manual_seed(rank)
        mesh = square()
        model = shard2(gpt(seed=mesh.get_local_rank("replicate")), mesh["shard"])  # replicas start with unequal weights
        given = mesh["replicate"].get_group() if group == "given" else None
        commhooks.attach(model, name, process_group=given)
        out.append((train(model, STEPS, rank), flat_params(model)))
    return out


@pytest.mark.parametrize("group", ["derived", pytest.param("given", marks=pytest.mark.soak)])
def test_trains_as_one_process_does(group: str) -> None:
    model, losses = single(STEPS, 4)
    for (plain_losses, plain), (half_losses, half) in spawn(body_trains, 4, group):
        assert plain_losses == pytest.approx(losses, abs=1e-6)
        torch.testing.assert_close(plain, flat_params(model), atol=1e-6, rtol=0)
        assert half_losses == pytest.approx(losses, rel=1e-3)
        assert 0 < (half - flat_params(model)).norm() / plain.norm() < 1e-3


def body_same_generator(rank: int, world: int) -> tuple[float, float]:
    """Compare PowerSGD on two replicas of an unsharded FSDP2 model with PowerSGD on DDP."""
    mesh = init_device_mesh(torch.get_default_device().type, (2, 1), mesh_dim_names=("replicate", "shard"))
    fsdp = shard2(gpt(), mesh["shard"])
    ddp = DistributedDataParallel(gpt(), bucket_cap_mb=0.001)
    there, here = commhooks.attach(ddp, POWERSGD), commhooks.attach(fsdp, POWERSGD)
    assert type(there.reduction) is type(here.reduction) is ch_powersgd.PowerSGD
    worst = 0.0
    for step in range(3):
        ours = one_backward(fsdp, rank, step)
        worst = max(worst, distance(ours, one_backward(ddp, rank, step)))
    assert here.stats()["compressed_steps"] == there.stats()["compressed_steps"] == 3
    assert here.stats()["payload_bytes"] == there.stats()["payload_bytes"]
    return worst, float(ours.sum())


def test_powersgd_is_the_same_on_ddp() -> None:
    (worst, a), (_, b) = spawn(body_same_generator, 2)
    assert worst < 1e-6
    assert a == b


def body_resume(rank: int, world: int) -> None:
    """Compare six steps at once with three steps, a checkpoint, a new model and three more steps."""
    saved: dict[str, Any] = {}

    def run(model: nn.Module, steps: range) -> None:
        for step in steps:
            for p, g in zip(model.parameters(), grads_of(model, rank, step), strict=True):
                p.data._local_tensor.sub_(0.1 * g)

    straight = inside()
    commhooks.attach(straight, POWERSGD)
    run(straight, range(6))

    first = inside()
    handle = commhooks.attach(first, POWERSGD)
    run(first, range(3))
    file = io.BytesIO()
    torch.save({"hook": handle.state_dict(), "model": [p._local_tensor for p in first.parameters()]}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    names = list(saved["hook"]["entries"])
    assert names
    assert all(name.endswith(f"[{rank % 2}/2]") for name in names)

    second = inside()
    for p, value in zip(second.parameters(), saved["model"], strict=True):
        p.data._local_tensor.copy_(value)
    resumed = commhooks.attach(second, POWERSGD)
    resumed.load_state_dict(saved["hook"])
    run(second, range(3, 6))
    assert torch.equal(flat_params(second), flat_params(straight))
    assert resumed.state.step >= 5

    # Wrap again with the live state instead of the checkpoint.
    third = inside()
    for p, q in zip(third.parameters(), second.parameters(), strict=True):
        p.data._local_tensor.copy_(q._local_tensor)
    resumed.commit()
    with pytest.raises(StateError, match="another model"):
        commhooks.attach(third, POWERSGD, state=resumed.state)
    resumed.detach()
    commhooks.attach(third, POWERSGD, state=resumed.state)
    straight_grads, third_grads = (one_backward(m, rank) for m in (straight, third))
    assert torch.equal(straight_grads, third_grads)

    # Loading the state under another sharding raises an error that names it.
    other = shard2(
        gpt(), init_device_mesh(torch.get_default_device().type, (4, 1), mesh_dim_names=("replicate", "shard"))["shard"]
    )
    with pytest.raises(StateError, match=rf"\[{rank % 2}/2\]' is not in the model"):
        commhooks.attach(other, POWERSGD).load_state_dict(saved["hook"])
    # If one rank refuses the state, no rank and no shard loads it.
    again = commhooks.attach(inside(), POWERSGD)
    with pytest.raises(StateError if rank == 3 else RankMismatchError, match=r"format 9|received along another axis"):
        again.load_state_dict(saved["hook"] | ({"format": 9} if rank == 3 else {}))
    assert again.state.step == 0
    again.load_state_dict(saved["hook"])
    assert again.state.step == saved["hook"]["step"]
    crossed = {**saved["hook"], "rank": 1 - rank // 2}
    with pytest.raises(StateError):
        resumed.load_state_dict(crossed)


def grads_of(model: nn.Module, rank: int, step: int) -> list[torch.Tensor]:
    model.zero_grad()
    model(*batch(step, rank)).backward()
    return [p.grad._local_tensor for p in model.parameters()]


@pytest.mark.full
def test_state_is_checkpointed_and_survives_rewrapping() -> None:
    spawn(body_resume, 4, timeout=120)


class Fails(commhooks.Reduction):
    """Averages. Raises on one rank at one step, in one of three places."""

    name, lossy = "fails", True

    def __init__(self, where: str, rank: int) -> None:
        self.where, self.rank, self.armed = where, rank, True

    def run(self, bucket: Bucket, ctx: StepContext) -> Generator[Requests, None, None]:
        def maybe(where: str) -> None:
            if self.armed and not bucket.storage.is_meta and where == self.where and dist.get_rank() == self.rank:
                raise ValueError(f"no {where}")

        maybe("encode")
        yield tuple(AllReduce(run) for run in bucket.segments())
        maybe("between")
        yield tuple(AllReduce(run) for run in bucket.segments())
        maybe("decode")


def body_failure(rank: int, world: int) -> None:
    """Check that a reduction's error on one rank raises on every rank of the mesh, and that training continues."""
    model = inside()
    for where in ("encode", "between", "decode"):
        reduction = Fails(where, rank=3)
        handle = commhooks.attach(model, reduction)
        with pytest.raises(
            ValueError if rank == 3 else RemoteHookError, match=f"no {where}" if rank % 2 else "no|shard"
        ):
            one_backward(model, rank)
        reduction.armed = False
        assert bool(one_backward(model, rank).isfinite().all())
        assert handle.state.step == 0
        handle.commit()
        assert handle.state.step == 1
        handle.detach()


def test_a_failure_reaches_every_rank() -> None:
    spawn(body_failure, 4)


class Twins(nn.Module):
    """Two parameters of one shape. The input selects one of them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = (nn.Linear(8, 8, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor, which: bool) -> torch.Tensor:
        return self.c((self.a if which else self.b)(x)).sum()


def body_unused(rank: int, world: int) -> None:
    """Check that a parameter without a gradient on some replicas is averaged as zero under its own name."""
    # torch 2.10 lacks the option, so the hook refuses a short shard
    if not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
        return
    mesh = init_device_mesh(torch.get_default_device().type, (world, 1), mesh_dim_names=("replicate", "shard"))
    model = fully_shard(Twins(), mesh=mesh["shard"])
    commhooks.attach(model, "allreduce")
    x = torch.arange(16.0).view(2, 8) + rank
    model(x, rank == 0).backward()
    alone = [Twins() for _ in range(world)]
    for other, twin in enumerate(alone):
        twin(torch.arange(16.0).view(2, 8) + other, other == 0).backward()
    for name, p in model.named_parameters():
        each = [dict(t.named_parameters())[name].grad for t in alone]
        mean = sum(g for g in each if g is not None) / world
        torch.testing.assert_close(p.grad.full_tensor(), mean)


def body_accumulation_and_precision(rank: int, world: int) -> None:
    body_unused(rank, world)
    mine, native = inside(), shard2(gpt(), square())
    handle = commhooks.attach(mine, "allreduce")
    for number, setter in enumerate(("set_requires_gradient_sync", "set_requires_all_reduce"), 1):
        for model in (mine, native):
            model.zero_grad()
            getattr(model, setter)(False)
            model(*batch(1, rank)).backward()
            getattr(model, setter)(True)
            model(*batch(2, rank)).backward()
        assert handle.stats()["steps"] == number
        for p, q in zip(grads(mine).values(), grads(native).values(), strict=True):
            assert torch.equal(p, q), setter
    mine.set_requires_all_reduce(False)  # the handle holds it back, and so does the plain averaging after it
    mine(*batch(1, rank)).backward()
    handle.detach()
    with pytest.raises(AttachError, match="kept back"):
        commhooks.attach(mine, "allreduce")
    mine.set_requires_all_reduce(True)
    mine(*batch(2, rank)).backward()
    handle = commhooks.attach(mine, "allreduce")
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    low = inside(mp_policy=policy)
    handle = commhooks.attach(low, POWERSGD)
    for step in range(3):
        assert bool(one_backward(low, rank, step).isfinite().all())
    assert handle.stats()["compressed_steps"] == 3
    frozen = inside()
    for p in frozen.blocks[0].parameters():
        p.requires_grad_(False)
    handle = commhooks.attach(frozen, "allreduce")
    assert one_backward(frozen, rank).numel() < one_backward(mine, rank).numel()
    for p in frozen.blocks[0].parameters():  # thawed after attach, so reduced from now on
        p.requires_grad_(True)
    assert distance(one_backward(frozen, rank), one_backward(mine, rank)) == 0


@pytest.mark.full
def test_unused_frozen_accumulated_and_low_precision() -> None:
    spawn(body_accumulation_and_precision, 4)


class MinusZero(commhooks.Reduction):
    """Averages gradients to -0.0."""

    name = "minus_zero"
    lossy = True

    def run(self, bucket: Bucket, ctx: StepContext) -> Requests:
        yield AllReduce(bucket.buffer)
        bucket.buffer.zero_().neg_()


def body_negative_zeros(rank: int, world: int) -> None:
    if not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
        return
    mesh = init_device_mesh(torch.get_default_device().type, (world, 1), mesh_dim_names=("replicate", "shard"))
    model = Twins()
    for part in (model.a, model.b):
        fully_shard(part, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    commhooks.attach(model, MinusZero())
    x = torch.arange(16.0).view(2, 8) + rank
    for step in range(4):
        model.zero_grad()
        for last in (False, True) if step % 2 else (True,):
            model.set_requires_all_reduce(last)
            model(x, rank == 0).backward()
        for name, p in model.named_parameters():
            assert p.grad is not None, (step, name)
            assert bool(p.grad.to_local().signbit().all()), (step, name)


def test_the_replica_that_does_not_use_a_parameter_has_the_same_negative_zeros() -> None:
    spawn(body_negative_zeros, 2)


WIDTH, PARTS = 12, 3


def plain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(PARTS)))


def sharded() -> Any:
    mesh = init_device_mesh(
        torch.get_default_device().type, (dist.get_world_size(), 1), mesh_dim_names=("replicate", "shard")
    )
    model = plain()
    for part in model:
        fully_shard(part, mesh=mesh["shard"])
    return fully_shard(model, mesh=mesh["shard"])


def data(step: int, rank: int) -> torch.Tensor:
    return torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def compare(model: nn.Module, step: int, rank: int, what: object) -> None:
    """Compare the gradients of one whole backward with the mean over all replicas, in every group."""
    model.zero_grad()
    model(data(step, rank)).square().sum().backward()
    ref = plain()
    world = dist.get_world_size()
    sum(ref(data(step, other)).square().sum() / world for other in range(world)).backward()
    for (name, p), q in zip(model.named_parameters(), ref.parameters(), strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), q.grad, msg=f"{what}, step {step}: {name}")


class Picky(commhooks.Reduction):
    """Refuses the model after the adapter has taken its slots."""

    name, lossy = "picky", True

    def check(self, layout: Any) -> None:
        raise HookConfigError("not this model")

    def run(self, bucket: Any, ctx: Any) -> Any:
        yield from ()


def body_other_parts(rank: int, world: int) -> None:
    for between in (False, True):  # True if backwards happen between the handles
        for parts in (("1", "0", ""), ("", "1"), ("", "1", ""), ("0", "1", "2")):
            model = sharded()
            for number, part in enumerate(parts):
                handle = commhooks.attach(model.get_submodule(part), "allreduce", timeout=20)
                every = {p for n in parts[: number + 1] for p in model.get_submodule(n).parameters()}
                whole = len(every) == 2 * PARTS
                if whole and (between or number == len(parts) - 1):
                    for step in range(3):
                        compare(model, step, rank, parts[: number + 1])
                    assert handle.stats()["steps"] == 3
                if number < len(parts) - 1:
                    handle.detach()
                    if whole and between:
                        compare(model, 7, rank, ("detached", *parts[: number + 1]))


def body_refused(rank: int, world: int) -> None:
    """After a refused attach to a part, plain averaging still covers the whole model."""
    model = sharded()
    commhooks.attach(model, "allreduce", timeout=20).detach()
    for part in ("1", ""):
        with pytest.raises(HookConfigError, match="not this model"):
            commhooks.attach(model.get_submodule(part), Picky(), timeout=20)
        for step in range(2):
            compare(model, step, rank, "refused")


@pytest.mark.full
def test_handles_over_other_parts_one_after_another() -> None:
    spawn(body_other_parts, 2, timeout=200)


def test_a_refused_handle_over_a_part() -> None:
    spawn(body_refused, 2, timeout=200)


class Halves(nn.Module):
    """Has two halves of one shape. A rank may use them in either order, or only one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.halves = nn.ModuleList(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(2))) for _ in range(2))

    def forward(self, x: torch.Tensor, path: tuple[int, ...]) -> torch.Tensor:
        for number in path:
            x = x + self.halves[number](x)
        return x.square().mean()


def body_two_handles(rank: int, world: int) -> None:
    """Run two handles over the same replicas, with a different order of groups on each rank."""
    mesh = init_device_mesh(torch.get_default_device().type, (world, 1), mesh_dim_names=("replicate", "shard"))["shard"]
    ways = (((0, 1), (1, 0)), ((0, 1), (0,)), ((1,), (0,)))  # by step, then rank
    for paths in (ways, ways[::-1]):
        model = Halves()
        for half in model.halves:
            for part in half:
                fully_shard(part, mesh=mesh)
            fully_shard(half, mesh=mesh)
        fully_shard(model, mesh=mesh)
        handles = [commhooks.attach(half, "allreduce", timeout=20) for half in model.halves]
        for step, path in enumerate((paths[0], *paths, paths[0])):
            model.zero_grad()
            model(data(step, rank), path[rank]).backward()
            ref = Halves()
            sum(ref(data(step, other), path[other]) / world for other in range(world)).backward()
            for (name, p), q in zip(model.named_parameters(), ref.parameters(), strict=True):
                wanted = q.grad if q.grad is not None else torch.zeros_like(q)
                torch.testing.assert_close(p.grad.full_tensor(), wanted, msg=f"{path} {step} {name}")
        assert [handle.stats()["steps"] for handle in handles] == [5, 5]


def test_two_handles_over_the_same_replicas() -> None:
    spawn(body_two_handles, 2, timeout=150)


def test_a_stream_is_waited_for_at_the_end_of_its_own_step_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user may run one backward on a stream that later has other work."""

    class Stream:
        device = torch.device("cuda", 0)

    waited: list[Stream] = []
    current = mock.Mock(wait_stream=waited.append)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
    order, stream = GroupOrder([], fixed=True), Stream()
    order._streams.add(stream)
    for _ in range(2):
        order.finish(mock.Mock())
    assert waited == [stream]
