"""torch's own 2-D mesh (HSDP) on gloo with 2 replicas x 2 shards. A handle reduces between the replicas."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import commhooks
from ch_fsdp.torch_internals.param_groups import param_groups
from ch_testing import spawn
from commhooks import AttachError, HookConfigError, HookNotSupportedError
from commhooks.checkpoint import dcp

from .fsdp_kit import batch, flat_params, gpt, grads, shard2, square

pytestmark = [pytest.mark.timeout(280), pytest.mark.gloo]

POWERSGD = "powersgd(rank=2, min_compression_rate=1)"
BF16 = torch.bfloat16
Setup = Callable[[Any], None]


def native(**options: Any) -> Any:
    return shard2(gpt(), square(), **options)


def each(setter: str, value: Any) -> Setup:
    """Call a setter that affects one module on all modules."""

    def call(model: Any) -> None:
        for module in (model, *model.blocks):
            getattr(module, setter)(value)

    return call


def together(*setups: Setup) -> Setup:
    return lambda model: [setup(model) for setup in setups] and None


def freeze(model: Any) -> None:
    for p in model.blocks[0].parameters():
        p.requires_grad_(False)


def backward(model: Any, rank: int, step: int = 77) -> torch.Tensor:
    model.zero_grad()
    model(*batch(step, rank)).backward()
    return flat(model)


def flat(model: Any) -> torch.Tensor:
    return torch.cat([g.reshape(-1) for g in grads(model).values()])


def slots(model: Any) -> list[tuple[Any, ...]]:
    """Return the attributes of torch's objects that attach changes."""
    found = [group.torch_group for group in param_groups(model)]
    return [
        (
            id(g.mesh_info),
            id(g.post_forward_mesh_info),
            g._all_reduce_hook,
            type(g._reduce_scatter_comm),
            getattr(g, "reduce_scatter_unused_params", None),
        )
        for g in found
    ]


# -- the numbers


def body_numbers(rank: int, world: int) -> None:
    """Compare with torch to the bit for factors, sums, precisions, offload, frozen parameters and resharding."""
    cases: list[tuple[Setup, dict[str, Any]]] = [
        (lambda model: None, {}),
        (lambda model: None, {"reshard_after_forward": False}),
        (lambda model: None, {"mp_policy": MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=BF16)}),
        (lambda model: None, {"offload_policy": CPUOffloadPolicy(pin_memory=False)}),
        (freeze, {}),
        (each("set_force_sum_reduction_for_comms", True), {}),
        (together(each("set_gradient_divide_factor", 8.0), each("set_force_sum_reduction_for_comms", True)), {}),
        (each("set_gradient_divide_factor", 2.0), {}),
        (lambda model: model.set_reshard_after_forward(False), {}),
    ]
    for number, (setup, options) in enumerate(cases):
        mine, torchs = native(**options), native(**options)
        before = slots(mine)
        handle = commhooks.attach(mine, "allreduce")
        for model in (mine, torchs):
            setup(model)
        for step in range(2):
            assert torch.equal(backward(mine, rank, step), backward(torchs, rank, step)), number
        stats = handle.stats()
        assert stats["steps"] == 2
        assert stats["replicate_payload_bytes"] > 0
        handle.detach()
        if number == 0:  # FSDP does not reshard such a root after its first forward
            assert [slot[:1] + slot[2:] for slot in slots(mine)] == [slot[:1] + slot[2:] for slot in before]
        assert torch.equal(backward(mine, rank), backward(torchs, rank)), number


def body_half(rank: int, world: int) -> None:
    """In fp16 torch divides elsewhere, so numbers near zero are rounded differently."""
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float16)
    for setup in (lambda model: None, each("set_gradient_divide_factor", 8.0)):
        mine, torchs = native(mp_policy=policy), native(mp_policy=policy)
        commhooks.attach(mine, "allreduce")
        for model in (mine, torchs):
            setup(model)
        torch.testing.assert_close(backward(mine, rank), backward(torchs, rank), rtol=1e-3, atol=1e-6)


@pytest.mark.full
def test_reduced_in_fp16() -> None:
    spawn(body_half, 4)


@pytest.mark.full
def test_allreduce_is_torchs_own_to_the_bit() -> None:
    spawn(body_numbers, 4, timeout=250)


def body_compressed(rank: int, world: int) -> None:
    """Check that bytes between replicas shrink, that residuals are not lost, and that parameters stay the same."""
    mine, torchs = native(), native()
    plain = commhooks.attach(native(), "allreduce")
    backward(plain.binding._model, rank)
    handle = commhooks.attach(mine, POWERSGD)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in (mine, torchs)]
    applied: dict[str, torch.Tensor] = {}
    true: dict[str, torch.Tensor] = {}
    for step in range(3):
        backward(mine, rank, step)
        backward(torchs, rank, step)
        for name, grad in grads(mine).items():
            applied[name] = applied.get(name, 0) + grad
        for name, grad in grads(torchs).items():
            true[name] = true.get(name, 0) + grad
    stats = handle.stats()
    assert stats["compressed_steps"] == stats["steps"] == 3
    assert stats["replicate_payload_bytes"] < 0.7 * 3 * plain.stats()["replicate_payload_bytes"]
    handle.commit()
    names = [name for name, field, _ in handle.state.entries() if field == "residual"]
    assert names
    assert all(name.endswith(f"[{rank % 2}/2]") for name in names)
    group = handle.binding.group
    assert dist.get_process_group_ranks(group) == [rank % 2, rank % 2 + 2]
    params = dict(mine.named_parameters())
    owed = {name: t for name, field, t in handle.state.entries() if field == "residual"}
    for name, total in applied.items():
        key = f"{name}[{rank % 2}/2]"
        local = params[name].to_local()
        mean = owed[key].reshape(local.shape).clone() if key in owed else torch.zeros_like(local)
        dist.all_reduce(mean, group=group)
        whole = DTensor.from_local(
            mean / 2, params[name].device_mesh, params[name].placements, shape=total.shape, stride=total.stride()
        ).full_tensor()
        torch.testing.assert_close(total + whole, true[name], atol=2e-5, rtol=1e-4)
    for p in mine.parameters():
        assert isinstance(p, DTensor)
        assert p.device_mesh.mesh_dim_names == p.grad.device_mesh.mesh_dim_names == ("replicate", "shard")
        assert p.placements == p.grad.placements == (Replicate(), Shard(0))
    handle.detach()
    commhooks.attach(mine, "allreduce")
    assert torch.equal(backward(mine, rank), backward(torchs, rank))
    norms = [nn.utils.clip_grad_norm_(model.parameters(), 0.1).full_tensor() for model in (mine, torchs)]
    assert torch.equal(*norms)
    for optimizer in optimizers:
        optimizer.step()
    dicts = [get_model_state_dict(model) for model in (mine, torchs)]
    assert all(torch.equal(t.full_tensor(), dicts[1][k].full_tensor()) for k, t in dicts[0].items())
    both = shard2(gpt(), square())  # one handle for each axis
    shard = commhooks.attach(both, "bf16_compress(accumulate='fp32')", axis="shard")
    between = commhooks.attach(both, POWERSGD, axis="replicate")
    backward(both, rank)
    assert shard.stats()["compressed_steps"] == between.stats()["compressed_steps"] == 1
    cast = commhooks.attach(native(), "bf16_compress")  # both axes
    backward(cast.binding._model, rank)
    assert {"shard_payload_bytes", "replicate_payload_bytes"} <= set(cast.stats())


@pytest.mark.full
def test_compressed_between_the_replicas() -> None:
    spawn(body_compressed, 4, timeout=200)


def body_tensor_parallel(rank: int, world: int) -> None:
    """With tensor parallelism the parameters have three mesh dimensions. One of them has the replicas."""
    mesh = init_device_mesh(
        torch.get_default_device().type, (2, 1, 2), mesh_dim_names=("outer", "inner", "tp")
    )  # no name marks replicas

    def made() -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        return fully_shard(model, mesh=mesh["outer", "inner"])

    def run(model: Any) -> torch.Tensor:
        model.zero_grad()
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(mesh.get_local_rank("outer")))
        model(x).square().mean().backward()
        return torch.cat([p.grad.to_local().reshape(-1) for p in model.parameters()])

    mine, torchs = made(), made()
    handle = commhooks.attach(mine, "allreduce")
    assert torch.equal(run(mine), run(torchs))
    assert handle.stats()["replicate_payload_bytes"] > 0
    handle.detach()
    assert torch.equal(run(mine), run(torchs))
    handle = commhooks.attach(mine, POWERSGD)
    run(mine)
    assert handle.stats()["compressed_steps"] == 1
    assert [row.name for row in handle.plan()][-1] == "2.bias", "the same on all tensor-parallel ranks"


@pytest.mark.full
def test_with_tensor_parallelism() -> None:
    spawn(body_tensor_parallel, 4)


# -- accumulation


def body_accumulation(rank: int, world: int) -> None:
    """Check that gradients of set_requires_all_reduce(False) on a 2-D mesh are reduced once."""
    for setter in ("set_requires_gradient_sync", "set_requires_all_reduce"):
        mine, torchs = native(), native()
        handle = commhooks.attach(mine, "allreduce")
        for step in range(2):
            for model in (mine, torchs):
                model.zero_grad()
                for part in range(3):
                    getattr(model, setter)(part == 2)
                    model(*batch(3 * step + part, rank)).backward()
            assert torch.equal(flat(mine), flat(torchs)), setter
        stats = handle.stats()
        assert stats["steps"] == 2, setter
        once = commhooks.attach(native(), "allreduce")
        backward(once.binding._model, rank)
        assert stats["payload_bytes"] == 2 * once.stats()["payload_bytes"], setter

    keeps = native()
    handle = commhooks.attach(keeps, POWERSGD)
    calls: list[int] = []
    for p in keeps.parameters():
        p.register_post_accumulate_grad_hook(lambda p: calls.append(1))
    keeps.set_requires_all_reduce(False)
    keeps(*batch(0, rank)).backward()
    assert not calls, "torch calls them when a gradient is whole"
    with pytest.raises(AttachError, match=r"set_requires_all_reduce\(True\) before detach"):
        handle.detach()
    if hasattr(keeps, "reset_iter_state"):
        keeps.reset_iter_state()
        keeps.set_requires_all_reduce(True)
        assert torch.equal(backward(keeps, rank), backward(fresh(POWERSGD), rank)), "what was kept back is forgotten"
        assert len(calls) == len(list(keeps.parameters()))
        handle.detach()
        before = native()
        before.set_requires_all_reduce(False)
        before(*batch(0, rank)).backward()
        with pytest.raises(AttachError, match="before attaching"):
            commhooks.attach(before, "allreduce")


def fresh(expr: str) -> Any:
    model = native()
    commhooks.attach(model, expr)
    return model


@pytest.mark.full
def test_accumulation() -> None:
    spawn(body_accumulation, 4, timeout=200)


# -- checkpoints


def body_resume(rank: int, world: int, folder: str) -> None:
    """Save model, optimizer and hook together and resume to the bit, on torch's 2-D mesh and on a 1-D mesh."""

    def built(mesh: Any) -> tuple[Any, torch.optim.Optimizer, Any]:
        model = shard2(gpt(), mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        return model, optimizer, commhooks.attach(model, POWERSGD, optimizer=optimizer)

    def run(model: Any, optimizer: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            optimizer.zero_grad()
            model(*batch(step, rank)).backward()
            optimizer.step()

    straight, optimizer, handle = built(square())
    run(straight, optimizer, range(3))
    assert handle.stats()["compressed_steps"] == 3
    weights, moments = get_state_dict(straight, optimizer)
    torch_dcp.save({"model": weights, "optim": moments, **dcp.sharded(handle)}, checkpoint_id=folder)
    run(straight, optimizer, range(3, 5))
    for mesh in (square(), square()["shard"]):
        model, optimizer, handle = built(mesh)
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optim": moments}
        torch_dcp.load(state, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
        dcp.load(handle, folder)
        run(model, optimizer, range(3, 5))
        assert torch.equal(flat_params(model), flat_params(straight))
        assert handle.state_dict()["step"] == 5


@pytest.mark.full
def test_save_and_resume(tmp_path: Any) -> None:
    spawn(body_resume, 4, str(tmp_path / "all"), timeout=200)


# -- refusals, and the model after them


def body_refused(rank: int, world: int) -> None:
    model = native()
    before = slots(model)
    mesh = square()

    def refused(error: type[Exception], text: str, what: Any, **options: Any) -> None:
        with pytest.raises(error, match=text):
            commhooks.attach(model, what, **options)
        assert slots(model) == before

    crossed = [dist.new_group([0, 3]), dist.new_group([1, 2])]
    wrong = crossed[rank in (1, 2)]
    refused(HookConfigError, "leave process_group out", POWERSGD, process_group=wrong)
    refused(commhooks.RankMismatchError, "hook", "allreduce" if rank else POWERSGD)
    refused(Exception, "", POWERSGD, state=3)
    mixed = gpt()
    for block in mixed.blocks:
        fully_shard(block, mesh=mesh["shard"])
    fully_shard(mixed, mesh=mesh)
    with pytest.raises(HookNotSupportedError, match=r"root: 2 ranks; blocks\.0, blocks\.1: none"):
        commhooks.attach(mixed, POWERSGD)
    handle = commhooks.attach(model, POWERSGD, process_group=mesh["replicate"].get_group())  # the same ranks
    assert slots(model) != before
    with pytest.raises(AttachError, match="detach"):
        commhooks.attach(model, POWERSGD)
    if hasattr(model, "set_separate_reduce_scatter_group"):
        model.set_separate_reduce_scatter_group(True)
    exact = backward(native(), rank)
    backward(model, rank)
    handle.detach()
    assert torch.equal(backward(model, rank), exact)
    groups = [group.torch_group for group in param_groups(model)]
    if hasattr(model, "set_separate_reduce_scatter_group"):
        assert all(g.mesh_info.reduce_scatter_process_group is not None for g in groups), "the user's own setting"


def test_refusals_leave_torchs_mesh() -> None:
    spawn(body_refused, 4, timeout=200)
