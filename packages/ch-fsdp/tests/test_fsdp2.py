"""Attaching to FSDP2: replicas, names, failed attaches, and parameters thawed or frozen after attach."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import commhooks
from ch_fsdp.torch_internals.param_groups import param_groups
from ch_testing import spawn
from commhooks import HookConfigError, HookNotSupportedError

from .fsdp_kit import batch, flat_params, gpt, line, shard2, square, train

pytestmark = [pytest.mark.timeout(180), pytest.mark.gloo]


def two_layers(mesh: DeviceMesh, *, frozen: bool) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    model[1].requires_grad_(not frozen)
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def step(model: Any, rank: int, number: int) -> None:
    model.zero_grad()
    model(torch.randn(4, 32, generator=torch.Generator().manual_seed(10 * number + rank))).square().mean().backward()


def body_thawed(rank: int, world: int, expr: str, axis: str) -> None:
    mesh = square()
    model = two_layers(mesh, frozen=True)
    handle = commhooks.attach(model, expr, axis=axis)
    step(model, rank, 0)
    model[1].requires_grad_(True)
    for number in (1, 2):
        step(model, rank, number)
    handle.commit()
    held = set(handle.state.draft.newest())
    names = {name for name, _ in held}
    assert any(name.startswith("1.weight") for name in names)
    saved = handle.state_dict()
    assert set(saved["entries"]) == names == set(commhooks.state_dict(handle.state)["entries"])
    assert {row.name.partition("[")[0] for row in handle.plan()} == {n for n, _ in model.named_parameters()}

    handle.load_state_dict(saved)
    assert set(handle.state.draft.newest()) == held
    commhooks.load_state_dict(handle.state, saved)
    assert set(handle.state.draft.newest()) == held

    for frozen in (False, True):  # built with all parameters, or thawed again before it loads
        again = two_layers(mesh, frozen=frozen)
        other = commhooks.attach(again, expr, axis=axis)
        again[1].requires_grad_(True)
        other.load_state_dict(saved)
        assert set(other.state.draft.newest()) == held
        for one in (model, again):
            step(one, rank, 3)
        for mine, same in zip(model.parameters(), again.parameters(), strict=True):
            assert torch.equal(mine.grad.to_local(), same.grad.to_local())
        handle.load_state_dict(saved)
        other.detach()

    model[1].requires_grad_(False)  # its residual waits until the parameter is thawed again
    step(model, rank, 4)
    handle.commit()
    assert set(handle.state_dict()["entries"]) == names
    assert set(commhooks.state_dict(handle.state)["entries"]) == names
    handle.load_state_dict(handle.state_dict())
    assert set(handle.state.draft.newest()) == held
    handle.detach()
    assert commhooks.attach(model, expr, axis=axis, state=handle.state).state.draft.newest().keys() == held


@pytest.mark.full
@pytest.mark.parametrize(
    ("expr", "axis"),
    [
        ("powersgd(rank=1, min_compression_rate=1)", "replicate"),
        ("quant4(error_feedback=True, block=16)", "shard"),
    ],
)
def test_parameters_thawed_and_frozen_keep_their_state(expr: str, axis: str) -> None:
    pytest.importorskip("ch_quant")
    spawn(body_thawed, 4, expr, axis)


def body_brackets(rank: int, world: int) -> None:
    """A module's name may look like the place of a shard."""
    model = nn.Sequential()
    model.add_module("e[0]", nn.Linear(32, 32))
    model = fully_shard(model, mesh=square()["shard"])
    handle = commhooks.attach(model, "quant4(error_feedback=True, block=16)", axis="shard")
    assert [row.name for row in handle.plan()] == [name for name, _ in model.named_parameters()]


def test_names_with_brackets_on_the_shard_axis() -> None:
    pytest.importorskip("ch_quant")
    spawn(body_brackets, 4)


POWERSGD = "powersgd(rank=2, min_compression_rate=1)"


def gathered(tensor: torch.Tensor) -> list[torch.Tensor]:
    every = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(every, tensor)
    return every


def body_compiled(rank: int, world: int) -> None:
    """Check that the hook on a compiled model gives the same numbers as on the model itself."""
    plain, compiled = shard2(gpt(), line(2)), torch.compile(shard2(gpt(), line(2)), backend="eager")
    handles = [commhooks.attach(model, "bf16_compress") for model in (plain, compiled)]
    for step in range(2):
        for model in (plain, compiled):
            model(*batch(step, rank)).backward()
    assert [handle.stats()["steps"] for handle in handles] == [2, 2]
    for ours, same in zip(plain.parameters(), compiled.parameters(), strict=True):
        torch.testing.assert_close(same.grad.to_local(), ours.grad.to_local())


@pytest.mark.full
def test_a_compiled_model_is_unwrapped() -> None:
    spawn(body_compiled, 2)


# -- which ranks are replicas


def body_stages(rank: int, world: int) -> None:
    """Check that two pipeline stages of the same shapes exchange nothing."""
    mesh = init_device_mesh(torch.get_default_device().type, (2, 2), mesh_dim_names=("pp", "shard"))
    model = shard2(gpt(seed=mesh.get_local_rank("pp")), mesh["shard"])
    before = [p.to_local().clone() for p in model.parameters()]
    for what in ("allreduce", "bf16_compress", POWERSGD):
        with pytest.raises(HookNotSupportedError, match=r"sharded over 2 of 4 ranks.*process_group"):
            commhooks.attach(model, what)
    handle = commhooks.attach(model, "bf16_compress", axis="shard")
    assert all(torch.equal(p.to_local(), old) for p, old in zip(model.parameters(), before, strict=True))
    model(*batch(0, rank)).backward()
    assert handle.stats()["steps"] == 1


def body_declared(rank: int, world: int) -> None:
    """Check that the mesh decides which ranks are replicas, also with pipeline stages."""
    mesh = init_device_mesh(torch.get_default_device().type, (2, 2, 1), mesh_dim_names=("pp", "dp_replicate", "shard"))
    stage, replica = mesh.get_local_rank("pp"), mesh.get_local_rank("dp_replicate")
    model = shard2(gpt(seed=10 * stage + replica), mesh["shard"])
    handle = commhooks.attach(model, POWERSGD)
    assert handle.binding.group.size() == 2
    assert torch.equal(flat_params(model), flat_params(shard2(gpt(seed=10 * stage), mesh["shard"])))
    alone = init_device_mesh(torch.get_default_device().type, (2, 1, 2), mesh_dim_names=("pp", "replicate", "shard"))
    handle = commhooks.attach(shard2(gpt(), alone["shard"]), "allreduce")  # one replica of each stage
    assert "shard_rounds" in handle.stats()
    assert "replicate_rounds" not in handle.stats()


def test_stages_are_not_taken_for_replicas() -> None:
    spawn(body_stages, 4)


def test_the_mesh_says_which_ranks_are_replicas() -> None:
    spawn(body_declared, 4)


def body_flattened(rank: int, world: int) -> None:
    """Check that a dimension with this name inside of the shard mesh does not count as replicas."""
    mesh = square()
    flat = mesh._flatten("dp")
    handle = commhooks.attach(shard2(gpt(), flat), "bf16_compress")
    assert "replicate_rounds" not in handle.stats()
    with pytest.raises(HookNotSupportedError, match="there is none"):
        commhooks.attach(shard2(gpt(), flat), POWERSGD)
    mixed = gpt()
    fully_shard(mixed.blocks[0], mesh=mesh["shard"])
    fully_shard(
        mixed, mesh=DeviceMesh.from_group(mesh["shard"].get_group(), torch.get_default_device().type)
    )  # does not name replicas
    with pytest.raises(HookNotSupportedError, match=r"root: none.*blocks.0: 2 ranks.*process_group"):
        commhooks.attach(mixed, POWERSGD)


def test_ranks_of_the_shard_mesh_are_no_replicas() -> None:
    spawn(body_flattened, 4)


# -- parameters and buffers of the replicas


def body_after_evaluation(rank: int, world: int, shards: int) -> list[float]:
    """A forward without a backward leaves the root gathered. Attach must still make replicas with unequal weights
    equal.
    """
    mesh = init_device_mesh(
        torch.get_default_device().type, (world // shards, shards), mesh_dim_names=("replicate", "shard")
    )
    replica = mesh.get_local_rank("replicate")
    model = shard2(gpt(seed=replica), mesh["shard"])
    with torch.no_grad():
        model(*batch(0, rank))
    handle = commhooks.attach(model, POWERSGD)
    assert torch.equal(flat_params(model), flat_params(gpt(seed=0)))
    train(model, 2, rank)
    every = gathered(flat_params(model))
    assert all(torch.equal(every[0], one) for one in every)
    handle.detach()
    commhooks.attach(model, POWERSGD, state=handle.state)  # after a training forward
    return []


@pytest.mark.parametrize(("world", "shards"), [(2, 1), pytest.param(4, 2, marks=pytest.mark.full)])
def test_attach_after_an_evaluation_forward(world: int, shards: int) -> None:
    spawn(body_after_evaluation, world, shards)


# -- tensor parallelism


class Planned(nn.Module):
    """``up`` and ``down`` are tensor-parallel (``down``'s bias is the same on its ranks); ``router`` is outside the plan."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.router = nn.Linear(16, 32), nn.Linear(32, 16), nn.Linear(16, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.router(self.down(torch.relu(self.up(x))))


def tensor_parallel(mesh: DeviceMesh, **options: Any) -> nn.Module:
    model = Planned()
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return fully_shard(model, mesh=mesh["shard"], **options)


def body_drift(rank: int, world: int) -> None:
    """Check that parameters that all tensor-parallel ranks share stay the same and have one name."""
    mesh = init_device_mesh(torch.get_default_device().type, (2, 1, 2), mesh_dim_names=("replicate", "shard", "tp"))
    model = tensor_parallel(mesh)
    handle = commhooks.attach(model, "powersgd(rank=2)")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(6):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(step + 10 * mesh.get_local_rank("replicate"))
        model(torch.randn(8, 16, generator=generator)).square().mean().backward()
        optimizer.step()
    assert handle.stats()["compressed_steps"] == 6
    place = f"[{mesh.get_local_rank('tp')}/2]"
    names = {row.name: row.treatment for row in handle.plan()}
    assert names["router.weight"] == names[f"up.weight{place}"] == "powersgd"
    assert {"router.bias", "down.bias", f"up.bias{place}", f"down.weight{place}"} <= set(names)
    for same in (model.router.weight, model.router.bias, model.down.bias):
        every = gathered(same.to_local())
        assert all(torch.equal(every[0], one) for one in every)
    parts = gathered(model.up.weight.to_local())
    assert not torch.equal(parts[0], parts[1]), "cut by tensor parallelism: this test would prove nothing"
    for what in ("batched_powersgd(rank=1)", "quant8(rounding='stochastic')"):
        with pytest.raises(HookNotSupportedError, match="drift apart"):
            commhooks.attach(tensor_parallel(mesh), what)
    cut = Planned()  # separate halves may round differently from one part
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel(), "router": ColwiseParallel()}
    parallelize_module(cut, mesh["tp"], plan)
    del cut.down.bias
    cut.down.register_parameter("bias", None)
    commhooks.attach(fully_shard(cut, mesh=mesh["shard"]), "batched_powersgd(rank=1)")


@pytest.mark.full
def test_parameters_that_tensor_parallel_ranks_share_stay_equal() -> None:
    spawn(body_drift, 4)


# -- names, and attaches that leave nothing behind


class Bracketed(nn.Module):
    """A module's name looks like the place of a shard."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ModuleDict({"e[0]": nn.Linear(16, 16), "e[1/2]": nn.Linear(16, 16)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.parts["e[1/2]"](self.parts["e[0]"](x))


def body_names(rank: int, world: int) -> None:
    mesh = square()["shard"]
    wrapped = checkpoint_wrapper(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)))
    inner = nn.Sequential(checkpoint_wrapper(nn.Linear(16, 16)), nn.Linear(16, 16))
    for make in (wrapped, inner, Bracketed()):
        model = fully_shard(make, mesh=mesh)
        handle = commhooks.attach(model, POWERSGD)
        model(torch.ones(2, 16) + rank).sum().backward()
        assert [row.name for row in handle.plan()] == [f"{name}[{rank % 2}/2]" for name, _ in model.named_parameters()]
        assert handle.stats()["compressed_steps"] == 1


class Picky(commhooks.Reduction):
    """Refuses the model after the adapter has taken its slots."""

    name, lossy = "picky", True

    def check(self, layout: Any) -> None:
        raise HookConfigError("not this model")

    def run(self, bucket: Any, ctx: Any) -> Iterator[Any]:
        yield from ()


def slots(model: nn.Module) -> list[tuple[Any, ...]]:
    groups = [group.torch_group for group in param_groups(model)]
    return [
        (g._all_reduce_hook, type(g._reduce_scatter_comm), getattr(g, "reduce_scatter_unused_params", None))
        for g in groups
    ]


def body_failed(rank: int, world: int) -> None:
    """Every refusal leaves the model unchanged, and the next attach succeeds."""
    model = shard2(gpt(), square()["shard"])
    before, forward = slots(model), len(model._forward_hooks)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def refused(error: type[Exception], what: Any, **options: Any) -> None:
        with pytest.raises(error):
            commhooks.attach(model, what, **options)
        assert slots(model) == before
        assert len(model._forward_hooks) == forward
        assert not optimizer._optimizer_step_post_hooks

    refused(HookConfigError, Picky(), optimizer=optimizer)
    refused(commhooks.RankMismatchError, "allreduce" if rank else POWERSGD, optimizer=optimizer)
    refused(Exception, POWERSGD, optimizer=optimizer, scaler=object())
    refused(Exception, POWERSGD, state=3)
    handle = commhooks.attach(model, POWERSGD)
    model(*batch(0, rank)).backward()
    assert handle.stats()["compressed_steps"] == 1
    handle.detach()
    refused_again = slots(model)
    with pytest.raises(HookConfigError):
        commhooks.attach(model, Picky())
    assert slots(model) == refused_again, "the plain averaging that detach() has left is still there"
    model.zero_grad()
    model(*batch(1, rank)).backward()
    every = gathered(model.blocks[0].norm.weight.grad.to_local())
    assert torch.equal(every[rank % 2], every[rank % 2 + 2])


def test_names_follow_the_model() -> None:
    spawn(body_names, 4)


@pytest.mark.full
def test_a_failed_attach_leaves_nothing() -> None:
    spawn(body_failed, 4)


def body_one_mesh(rank: int, world: int) -> None:
    commhooks.attach(shard2(gpt(), line(2)), "bf16_compress")  # no other ranks, so no names are needed


def test_one_mesh_over_all_ranks_needs_no_names() -> None:
    spawn(body_one_mesh, 2)


class OwnExpert(nn.Module):
    """A trunk that all ranks share, and an expert of each rank, which FSDP2 does not manage."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        torch.manual_seed(rank)
        self.trunk, self.norm = nn.Linear(256, 256), nn.BatchNorm1d(256)
        wide = 64 * (rank + 1)
        self.expert = nn.Sequential(nn.Linear(256, wide), nn.BatchNorm1d(wide), nn.ReLU(), nn.Linear(wide, 256))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.expert(self.norm(self.trunk(x))).square().mean()


def body_ignored(rank: int, world: int) -> None:
    replicas = init_device_mesh(torch.get_default_device().type, (world, 1), mesh_dim_names=("replicate", "shard"))
    for hook, mesh, axis in (
        ("quant4(error_feedback=True)", replicas, "replicate"),
        ("bf16_compress", line(world), "shard"),
        ("quant8", line(world), "gather"),
    ):
        model = OwnExpert(rank)
        for buffer in (model.norm.running_mean, model.expert[1].running_mean):
            buffer.fill_(rank)
        own = {name: tensor.clone() for name, tensor in model.expert.state_dict().items()}
        fully_shard(model, mesh=mesh, ignored_params=set(model.expert.parameters()))
        trained = [p for name, p in model.named_parameters() if not name.startswith("expert")]
        optimizer = torch.optim.SGD(trained, lr=0.1)
        given = {"optimizer": optimizer} if axis == "replicate" else {}
        handle = commhooks.attach(model, hook, axis=axis, **given)
        for name, tensor in model.expert.state_dict().items():
            assert torch.equal(tensor, own[name]), f"{name} of rank {rank} is no longer its own"
        if axis != "replicate":
            handle.detach()
            continue
        every = gathered(torch.cat([model.norm.running_mean, *(p.detach().to_local().reshape(-1) for p in trained)]))
        assert all(torch.equal(one, every[0]) for one in every), "the first replica's trunk and buffers go to all"
        of_expert = torch.optim.SGD(model.expert.parameters(), lr=0.1)
        for used in (False, True):
            model(torch.randn(8, 256)).backward()
            of_expert.step()  # uses none of the hook's averages
            if used:
                optimizer.step()
            of_expert.zero_grad()
            optimizer.zero_grad()
            assert handle.state_dict()["step"] == used


def test_parameters_that_fsdp2_ignores_stay_each_ranks_own() -> None:
    spawn(body_ignored, 2)


def body_frozen(rank: int, world: int) -> None:
    """A model that is frozen now may train later, such as the critic of a GAN."""
    for replicas, hooks in (
        (world, ("allreduce", "quant4(error_feedback=True)", POWERSGD, "warmup(powersgd(rank=2), steps=1)")),
        (1, ("bf16_compress", "quant4(error_feedback=True)")),
    ):
        mesh = init_device_mesh(
            torch.get_default_device().type, (replicas, world // replicas), mesh_dim_names=("replicate", "shard")
        )
        for hook in hooks:
            model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).requires_grad_(False)
            for part in model:
                fully_shard(part, mesh=mesh)
            fully_shard(model, mesh=mesh)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            handle = commhooks.attach(model, hook, optimizer=optimizer)
            for trains, steps in ((False, 0), (True, 3), (False, 3), (True, 6)):
                model.requires_grad_(trains)
                for _ in range(3):
                    optimizer.zero_grad()
                    model(torch.randn(4, 64, requires_grad=True)).square().mean().backward()
                    optimizer.step()
                assert handle.stats()["steps"] == steps, hook
                assert handle.state_dict()["step"] == (0 if hook == "bf16_compress" else steps), hook
                assert handle.report().to_dict()["hook"] == hook
            handle.assert_active()
            handle.detach()


def test_a_frozen_model_has_a_handle_and_no_steps() -> None:
    spawn(body_frozen, 2)
