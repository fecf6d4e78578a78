"""Coded weight gathers of FSDP2, compared with one process that computes with the decoded weights."""

import copy
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import commhooks
from ch_testing import spawn
from commhooks import (
    AttachError,
    HookConfigError,
    HookNotSupportedError,
    RankMismatchError,
    RemoteHookError,
)

from .fsdp_kit import batch, distance, gpt, grads, line, shard2, single, square, train, whole

pytest.importorskip("ch_quant")
pytestmark = [pytest.mark.timeout(180), pytest.mark.gloo]

HOOK = "quant8(block=16)"
BF16 = torch.bfloat16


def decoded(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the weights that this rank computes with, by name. The model is sharded again afterwards."""
    sharded = [m for m in model.modules() if isinstance(m, FSDPModule)]
    for module in sharded:
        module.unshard()
    found = {name: whole(p.detach()).clone() for name, p in model.named_parameters()}
    for module in sharded:
        module.reshard()
    return found


def same_everywhere(tensors: dict[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        rows = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
        dist.all_gather(rows, tensor)
        assert all(torch.equal(row, rows[0]) for row in rows), name


def reference(plain: nn.Module, weights: dict[str, torch.Tensor], world: int, step: int) -> dict[str, torch.Tensor]:
    """Return the mean gradient of all ranks' batches in one process with these weights."""
    plain.zero_grad()
    with torch.no_grad():
        for name, p in plain.named_parameters():
            p.copy_(weights[name])
    (sum(plain(*batch(step, rank)) for rank in range(world)) / world).backward()
    return {name: p.grad.clone() for name, p in plain.named_parameters() if p.grad is not None}


def run_case(rank: int, world: int, model: nn.Module, plain: nn.Module, limit: float = 1e-5, **attach: Any) -> Any:
    """Run two steps. Decoded weights are near the exact ones and equal on all ranks, and gradients
    match the reference.
    """
    exact = {name: whole(p.detach()).clone() for name, p in model.named_parameters()}
    handle = commhooks.attach(model, attach.pop("hook", HOOK), axis="gather", **attach)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in (1, 2):
        weights = decoded(model)
        same_everywhere(weights)
        now = {name: whole(p.detach()) for name, p in model.named_parameters()}
        off = distance({k: v.float() for k, v in weights.items()}, {k: v.float() for k, v in now.items()})
        assert 0 < off < 1e-2
        for name, p in now.items():  # norms, biases and embeddings stay exact
            if p.ndim < 2 or "symbol" in name:
                assert torch.equal(weights[name], p.to(weights[name].dtype)), name
        if step == 1:
            assert all(torch.equal(p, exact[name]) for name, p in now.items()), "the sharded parameters stay exact"
        with torch.no_grad():
            model(*batch(9, rank))  # an evaluation between steps
        with torch.inference_mode():
            model(*batch(9, rank))
        if any(g.torch_group._sharded_state.name != "SHARDED" for g in handle.binding.groups):
            for g in handle.binding.groups:
                g.reshard()
        optimizer.zero_grad()
        model(*batch(step, rank)).backward()
        wanted = reference(plain, weights, world, step)
        assert distance(grads(model), wanted) < limit
        optimizer.step()
    handle.assert_active()
    return handle


def body_cases(rank: int, world: int) -> None:
    mesh = line(world)
    for after in (True, False):
        run_case(rank, world, shard2(gpt(), mesh, reshard_after_forward=after), gpt())
    for hook in (
        "bf16_compress",
        "bf16_compress(accumulate='fp32')",
        "policy({'*.qkv.*': quant8(block=16), '*.weight': allreduce, '*': allreduce})",
    ):
        run_case(rank, world, shard2(gpt(), mesh), gpt(), hook=hook)
    placed = lambda p: Shard(1) if p.ndim == 2 and p.shape[1] % world == 0 else None  # noqa: E731
    run_case(rank, world, shard2(gpt(), mesh, shard_placement_fn=placed), gpt())
    run_case(rank, world, shard2(gpt(), mesh, offload_policy=CPUOffloadPolicy(pin_memory=False)), gpt())
    mixed = shard2(gpt(), mesh, mp_policy=MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32))
    run_case(rank, world, mixed, gpt(), limit=5e-2)

    frozen, plain = gpt(), gpt()  # LoRA: most parameters are frozen
    for one in (frozen, plain):
        for name, p in one.named_parameters():
            p.requires_grad_("down" in name)
    run_case(rank, world, shard2(frozen, mesh), plain)

    body_checkpointed(rank, world)

    model = shard2(gpt(), mesh)
    model.blocks[0].set_modules_to_forward_prefetch([model.blocks[1]])
    model.blocks[1].set_modules_to_backward_prefetch([model.blocks[0]])
    run_case(rank, world, model, gpt())

    compiled = gpt()
    for number, block in enumerate(compiled.blocks):
        compiled.blocks[number].compile(backend="aot_eager")
        fully_shard(block, mesh=mesh)
    run_case(rank, world, fully_shard(compiled, mesh=mesh), gpt())


def body_checkpointed(rank: int, world: int) -> None:
    """Activation checkpointing computes each forward twice."""
    made = gpt()
    for number, block in enumerate(made.blocks):
        made.blocks[number] = checkpoint_wrapper(block)
    model = shard2(made, line(world))
    handle = commhooks.attach(model, HOOK, axis="gather")
    weights = {k.replace("_checkpoint_wrapped_module.", ""): v for k, v in decoded(model).items()}
    model(*batch(1, rank)).backward()
    found = {k.replace("_checkpoint_wrapped_module.", ""): v for k, v in grads(model).items()}
    assert distance(found, reference(gpt(), weights, world, 1)) < 1e-5
    handle.detach()


class Tied(nn.Module):
    """An embedding and a head of one size, tied or not, and one block used twice."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.symbol, self.head = nn.Embedding(33, 32), nn.Linear(32, 33, bias=False)
        self.block = nn.Linear(32, 32)
        if tied:
            self.head.weight = self.symbol.weight

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.block(torch.tanh(self.block(self.symbol(x)))))
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), y.flatten())


def body_tied(rank: int, world: int) -> None:
    for tied in (True, False):  # untied, an exact parameter and a cast one have one size
        for hook in (HOOK, "bf16_compress"):
            model = Tied(tied)
            fully_shard(model.block, mesh=line(world))
            run_case(rank, world, fully_shard(model, mesh=line(world)), Tied(tied), hook=hook)


def body_accumulated(rank: int, world: int) -> None:
    for reshard in (True, False, None):  # None: every backward reduces its gradients
        model = shard2(gpt(), line(world))
        commhooks.attach(model, HOOK, axis="gather")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for step in range(2):
            optimizer.zero_grad()
            weights, wanted = decoded(model), dict[str, torch.Tensor]()
            for number in range(3):
                if reshard is not None:
                    model.set_requires_gradient_sync(number == 2)
                    model.set_reshard_after_backward(reshard or number == 2)
                model(*batch(3 * step + number, rank)).backward()
                for name, grad in reference(gpt(), weights, world, 3 * step + number).items():
                    wanted[name] = wanted.get(name, 0) + grad
            assert distance(grads(model), wanted) < 1e-5, (reshard, step)
            optimizer.step()


class OneHot(nn.Module):
    """The backward of its first layer needs no weights, because the input has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.head = nn.Linear(33, 32), nn.Linear(32, 33)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        symbols = nn.functional.one_hot(x, 33).to(self.head.weight.dtype)
        return nn.functional.cross_entropy(self.head(torch.tanh(self.first(symbols))).flatten(0, 1), y.flatten())


def body_switched(rank: int, world: int) -> None:
    """Units that are not gathered for the backward, and switches of ``reshard_after_forward`` between steps."""
    model = OneHot()
    fully_shard(model.first, mesh=line(world))
    fully_shard(model.head, mesh=line(world))
    fully_shard(model, mesh=line(world))
    model.first.set_unshard_in_backward(False)
    handle = run_case(rank, world, model, OneHot())
    handle.detach()
    model = shard2(gpt(), line(world))
    run_case(rank, world, model, gpt())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step, after in enumerate((False, True, False), 3):
        model.set_reshard_after_forward(after)
        weights = decoded(model)
        same_everywhere(weights)
        optimizer.zero_grad()
        model(*batch(step, rank)).backward()
        assert distance(grads(model), reference(gpt(), weights, world, step)) < 1e-5, (step, after)
        optimizer.step()


def body_four(rank: int, world: int) -> None:
    run_case(rank, world, shard2(gpt(), line(world), reshard_after_forward=2), gpt())
    handle = run_case(rank, world, shard2(gpt(), square()), gpt())
    assert handle.stats()["gather_payload_bytes"] > 0
    both = shard2(gpt(), square())  # with the gradients' axes
    gather = commhooks.attach(both, HOOK, axis="gather")
    inside = commhooks.attach(both, HOOK, axis="shard")
    between = commhooks.attach(both, HOOK, axis="replicate")
    losses = train(both, 6, rank)
    assert losses[-1] == pytest.approx(single(6, world)[1][-1], rel=2e-2)
    for handle, axis in ((gather, "gather"), (inside, "shard"), (between, "replicate")):
        assert handle.stats()["steps"] == 6
        assert handle.stats()[f"{axis}_payload_bytes"] > 0
        handle.detach()


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.symbol, self.up, self.down, self.norm = (
            nn.Embedding(33, 32),
            nn.Linear(32, 64),
            nn.Linear(64, 33),
            nn.LayerNorm(32),
        )

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out = self.down(torch.relu(self.up(self.norm(self.symbol(x)))))
        return nn.functional.cross_entropy(out.flatten(0, 1), y.flatten())


def body_tensor_parallel(rank: int, world: int) -> None:
    mesh = init_device_mesh(torch.get_default_device().type, (2, 2), mesh_dim_names=("dp", "tp"))
    model = parallelize_module(Pair(), mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    model = fully_shard(model, mesh=mesh["dp"])
    commhooks.attach(model, HOOK, axis="gather")
    exact = {name: whole(p.detach()).clone() for name, p in model.named_parameters()}
    weights = decoded(model)
    same_everywhere(weights)
    assert 0 < distance(weights, exact) < 1e-2
    replica = mesh.get_local_rank("dp")
    model(*batch(1, replica)).backward()
    assert distance(grads(model), reference(Pair(), weights, 2, 1)) < 1e-5


def body_state_dict(rank: int, world: int) -> None:
    """The state dict, clipping and later gathers see exact parameters. ``detach`` restores torch's gather."""
    model, plain = shard2(gpt(), line(world)), shard2(gpt(), line(world))
    handle = commhooks.attach(model, HOOK, axis="gather")
    model(*batch(0, rank))
    for (name, mine), theirs in zip(model.state_dict().items(), plain.state_dict().values(), strict=True):
        assert torch.equal(whole(mine), whole(theirs)), name
    handle.detach()
    for g, other in zip(handle_groups(model), handle_groups(plain), strict=True):
        assert type(g._all_gather_comm) is type(other._all_gather_comm)
    a, b = train(model, 3, rank), train(plain, 3, rank)
    assert a == b


def handle_groups(model: nn.Module) -> list[Any]:
    return [m._get_fsdp_state()._fsdp_param_group for m in model.modules() if isinstance(m, FSDPModule)]


class Failing(commhooks.Reduction):
    """Raises on one rank in the second gather."""

    name, lossy, collectives = "failing", True, frozenset({"all_gather"})

    def __init__(self, rank: int) -> None:
        self.rank, self.calls = rank, 0

    def run(self, bucket: commhooks.Bucket, ctx: commhooks.StepContext) -> commhooks.Stages:
        yield from ()

    def gather_weights(self, weights: commhooks.Weights, ctx: commhooks.StepContext) -> commhooks.Stages:
        if not weights.storage.is_meta:
            self.calls += 1
            if self.calls == 2 and self.rank == 1:
                raise ValueError("broken here")
        yield from commhooks.Plain().gather_weights(weights, ctx)


def body_errors(rank: int, world: int) -> None:
    model = shard2(gpt(), line(world))
    handle = commhooks.attach(model, Failing(rank), axis="gather")
    with pytest.raises(ValueError if rank == 1 else RemoteHookError, match="broken here"):
        model(*batch(0, rank)).backward()
    model.zero_grad()
    model(*batch(1, rank)).backward()  # the model stays usable
    for module in (model, *model.blocks):
        module.set_custom_all_gather(type(handle_groups(shard2(gpt(), line(world)))[0]._all_gather_comm)())
    loss = model(*batch(1, rank))
    with pytest.raises(AttachError, match="no longer in place"):
        loss.backward()
    handle.detach()


def body_refused(rank: int, world: int) -> None:
    model = shard2(gpt(), line(world))
    for hook in ("powersgd(rank=2)", "quant4(error_feedback=True)", "quant8(rounding='stochastic')", "topk"):
        with pytest.raises(HookNotSupportedError, match="cannot gather weights"):
            commhooks.attach(model, hook, axis="gather")
    with pytest.raises(HookConfigError, match="optimizer="):
        commhooks.attach(model, HOOK, axis="gather", optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(RankMismatchError):
        commhooks.attach(model, HOOK if rank else "quant4", axis="gather")
    handle = commhooks.attach(model, HOOK, axis="gather")
    with pytest.raises(AttachError, match="on its gather axis"):
        commhooks.attach(model, HOOK, axis="gather")
    handle.detach()
    mixed = copy.deepcopy(gpt())
    mixed.blocks[0].norm.to(BF16)
    with pytest.raises(HookNotSupportedError, match="one floating dtype"):
        commhooks.attach(shard2(mixed.requires_grad_(True), line(world)), HOOK, axis="gather")


def body_bytes(rank: int, world: int) -> None:
    """The counters match the blocks' codes, scales and exact parameters, each gathered twice."""
    model = fully_shard(nn.Linear(64, 64), mesh=line(world))
    handle = commhooks.attach(model, "quant8(block=32)", axis="gather")
    model(torch.ones(2, 64)).sum().backward()  # one root, which stays gathered after its forward
    coded, exact = 64 * 64 + 2 * 64 * 64 // 32, 64 * 4
    assert handle.stats()["gather_payload_bytes"] == coded + exact
    rows = {row.treatment: row.payload_bytes for row in handle.report().rows}
    assert rows == {"quant8": coded, "plain": exact}


def trained(handles: list[Any], model: nn.Module, optimizer: Any, rank: int, numbers: range) -> None:
    for number in numbers:
        optimizer.zero_grad()
        model(*batch(number, rank)).backward()
        optimizer.step()
    for handle in handles:
        handle.assert_active()


def two_axes(world: int) -> tuple[list[Any], Any, Any]:
    model = shard2(gpt(), line(world))
    feedback = "quant4(block=16, error_feedback=True)"
    handles = [commhooks.attach(model, HOOK, axis="gather"), commhooks.attach(model, feedback, axis="shard")]
    return handles, model, torch.optim.SGD(model.parameters(), lr=0.1)


def bits(model: nn.Module) -> list[torch.Tensor]:
    return [whole(p.detach()) for p in model.parameters()]


def body_never_killed(rank: int, world: int) -> list[torch.Tensor]:
    handles, model, optimizer = two_axes(world)
    trained(handles, model, optimizer, rank, range(6))
    return bits(model)


def body_killed(rank: int, world: int, folder: str) -> None:
    """Save after three steps, and die in the fourth."""
    handles, model, optimizer = two_axes(world)
    trained(handles, model, optimizer, rank, range(3))
    saved = {
        "hooks": [handle.state_dict() for handle in handles],
        "model": {n: whole(p) for n, p in model.state_dict().items()},
    }
    torch.save(saved, f"{folder}/{rank}")
    dist.barrier()
    model(*batch(3, rank))
    os.kill(os.getpid(), signal.SIGKILL)


def body_started_again(rank: int, world: int, folder: str) -> list[torch.Tensor]:
    saved = torch.load(f"{folder}/{rank}", weights_only=True)
    handles, model, optimizer = two_axes(world)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(distribute_tensor(saved["model"][name], p.device_mesh, p.placements))
    for handle, state in zip(handles, saved["hooks"], strict=True):
        handle.load_state_dict(state)
    trained(handles, model, optimizer, rank, range(3, 6))
    return bits(model)


def on_two_meshes(world: int) -> FSDPModule:
    """One block on all ranks, the other and the rest on pairs, as experts and dense layers of an MoE."""
    model = gpt()
    fully_shard(model.blocks[0], mesh=line(world))
    mesh = init_device_mesh(torch.get_default_device().type, (2, world // 2), mesh_dim_names=("replicate", "shard"))
    fully_shard(model.blocks[1], mesh=mesh)
    return fully_shard(model, mesh=mesh)


def body_all_axes(rank: int, world: int) -> None:
    model = shard2(gpt(), square())
    before = [(g._all_gather_comm, g._reduce_scatter_comm) for g in handle_groups(model)]
    hooks = {"gather": HOOK, "shard": "quant4(block=16)", "replicate": "quant8(block=16)"}
    handles = {axis: commhooks.attach(model, hook, axis=axis) for axis, hook in hooks.items()}
    losses = train(model, 4, rank)
    assert losses[-1] == pytest.approx(single(4, world)[1][-1], rel=5e-2)
    for handle in handles.values():
        assert handle.stats()["wire_bytes"] > 0
        assert handle.stats()["steps"] == 4
        handle.assert_active()
    for handle in reversed(handles.values()):
        handle.detach()
    assert [(g._all_gather_comm, g._reduce_scatter_comm) for g in handle_groups(model)] == before


@pytest.mark.full
def test_hooks_on_all_axes() -> None:
    spawn(body_all_axes, 4, timeout=120)


@pytest.mark.full
def test_a_killed_run_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    wanted, _ = spawn(body_never_killed, 2)
    spawn(body_killed, 2, str(tmp_path), expect_exit={0: -signal.SIGKILL, 1: -signal.SIGKILL})
    found, _ = spawn(body_started_again, 2, str(tmp_path))
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.full
def test_cases_on_two() -> None:
    spawn(body_cases, 2, timeout=150)


@pytest.mark.full
def test_cases_on_four() -> None:
    spawn(body_cases, 4, timeout=170)


def test_tied_weights_and_blocks_used_twice() -> None:
    spawn(body_tied, 2)


@pytest.mark.full
def test_accumulation() -> None:
    spawn(body_accumulated, 2)


@pytest.mark.full
def test_switches_between_steps() -> None:
    spawn(body_switched, 2)


def body_several_meshes(rank: int, world: int) -> None:
    """Groups on several meshes, as in an MoE: one engine for each mesh, and all of them end a step together."""
    model = on_two_meshes(world)
    handle = run_case(rank, world, model, gpt())
    stats = handle.stats()
    assert stats["gather_payload_bytes"] > 0
    assert stats["gather_2_payload_bytes"] > 0
    handle.detach()


@pytest.mark.full
def test_groups_on_several_meshes() -> None:
    spawn(body_several_meshes, 4, timeout=150)


@pytest.mark.full
def test_meshes_of_four() -> None:
    spawn(body_four, 4, timeout=150)


@pytest.mark.full
def test_tensor_parallel_parameters() -> None:
    spawn(body_tensor_parallel, 4, timeout=150)


@pytest.mark.full
def test_sharded_parameters_stay_exact() -> None:
    spawn(body_state_dict, 2)


def test_errors_reach_all_ranks() -> None:
    spawn(body_errors, 2)


@pytest.mark.full
def test_refusals() -> None:
    spawn(body_refused, 2)


def test_bytes() -> None:
    spawn(body_bytes, 2)
