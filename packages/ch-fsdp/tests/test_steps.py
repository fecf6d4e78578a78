"""Steps of FSDP2. Each reduces every group once, in one order on all ranks, and ends when FSDP2 ends a backward."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.utils.checkpoint import checkpoint

import commhooks
from ch_testing import spawn
from commhooks import AllReduce, Bucket, HookResultError, RemoteHookError, Requests, StateError, StepContext

from .fsdp_kit import grads, whole

pytestmark = [pytest.mark.timeout(280), pytest.mark.gloo]

WIDTH, STEPS = 24, 4
POWERSGD = "powersgd(rank=2, min_compression_rate=1)"
Loss = Callable[["Net", int, int], torch.Tensor]


class Net(nn.Module):
    """Four linear layers of one shape. A mix-up of two layers shows only in the numbers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.entry = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor, path: tuple[int, ...] = (0, 1, 2), nested: bool = False) -> torch.Tensor:
        x = self.entry(x)
        for number in path:
            block = self.blocks[number]
            x = x + torch.tanh(checkpoint(block, x, use_reentrant=True) if nested else block(x))
        return x


def data(step: int, rank: int) -> torch.Tensor:
    return torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


def replicas(world: int) -> dict[str, Any]:
    mesh = init_device_mesh(torch.get_default_device().type, (world, 1), mesh_dim_names=("replicate", "shard"))
    return {"mesh": mesh["shard"], "group": mesh["replicate"].get_group()}


def sharded(mesh: Any, **options: Any) -> Any:
    model = Net()
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def both_ways(model: Net, step: int, rank: int) -> torch.Tensor:
    """Use every block twice in one forward."""
    return (model(data(step, rank)) * model(data(step, rank + 50))).square().mean()


def sometimes_twice(model: Net, step: int, rank: int) -> torch.Tensor:
    """Use blocks more often in later steps, so that the first steps do not announce it."""
    return model(data(step, rank), (0, 1, 2) + (1, 0) * max(0, step - 1)).square().mean()


def experts(model: Net, step: int, rank: int) -> torch.Tensor:
    """Use block 1 + rank on this replica only, and never on the other in the first steps."""
    return model(data(step, rank), (0, 1 + (rank + step // 2) % 2)).square().mean()


def crossed(model: Net, step: int, rank: int) -> torch.Tensor:
    """Each replica uses the blocks in a different order."""
    return model(data(step, rank), ((0, 1, 2), (2, 0, 1), (1, 2, 0))[(rank + step) % 3]).square().mean()


def reentrant(model: Net, step: int, rank: int) -> torch.Tensor:
    return model(data(step, rank).requires_grad_(), nested=True).square().mean()


def mean_gradients(loss: Loss, step: int, world: int) -> dict[str, torch.Tensor]:
    """Return the gradients of one process on every replica's batch."""
    model = Net()
    sum(loss(model, step, rank) / world for rank in range(world)).backward()
    return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}


def applied_and_owed(handle: Any, applied: dict[str, torch.Tensor], world: int) -> dict[str, torch.Tensor]:
    """Return the sum of all applied gradients and of the mean residual."""
    handle.commit()
    owed = {name.partition("[")[0]: t for name, field, t in handle.state.entries() if field == "residual"}
    whole_sum = {}
    for name, sent in applied.items():
        mine = owed[name].reshape(sent.shape).clone() if name in owed else torch.zeros_like(sent)
        dist.all_reduce(mine)
        whole_sum[name] = sent + mine / world
    return whole_sum


def body_once(rank: int, world: int, losses: tuple[Loss, ...]) -> None:
    place = replicas(world)
    for loss in losses:
        for expr in ("allreduce", POWERSGD):
            model = sharded(place["mesh"])
            handle = commhooks.attach(model, expr, process_group=place["group"], timeout=30)
            applied: dict[str, torch.Tensor] = {}
            true: dict[str, torch.Tensor] = {}
            for step in range(STEPS):
                model.zero_grad(set_to_none=step % 2 == 0)
                loss(model, step, rank).backward()
                for name, grad in grads(model).items():
                    applied[name] = applied.get(name, 0) + grad
                for name, grad in mean_gradients(loss, step, world).items():
                    true[name] = true.get(name, 0) + grad
            stats = handle.stats()
            assert stats["steps"] == STEPS, (loss.__name__, stats)
            assert stats["compressed_steps"] == (STEPS if expr == POWERSGD else 0)
            if expr == "allreduce":  # each parameter once a step
                assert stats["payload_bytes"] == 4 * STEPS * sum(p.numel() for p in Net().parameters())
            for name, total in applied_and_owed(handle, applied, world).items():
                torch.testing.assert_close(
                    total, true[name], atol=2e-5, rtol=1e-4, msg=f"{loss.__name__} {expr} {name}"
                )


@pytest.mark.full
def test_each_parameter_is_reduced_once_a_step() -> None:
    spawn(body_once, 2, (both_ways, sometimes_twice, reentrant), timeout=200)


@pytest.mark.full
def test_groups_used_on_one_replica_only_are_averaged_as_zeros() -> None:
    spawn(body_once, 2, (experts, crossed), timeout=200)


def body_accumulated(rank: int, world: int) -> None:
    """Run several synchronised backwards for one optimizer step. The optimizer uses each, so none is rolled back."""
    place = replicas(world)
    for given in (True, False):
        model = sharded(place["mesh"])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)  # the parameters of mean_gradients()
        handle = commhooks.attach(
            model, POWERSGD, process_group=place["group"], optimizer=optimizer if given else None, timeout=30
        )
        applied: dict[str, torch.Tensor] = {}
        true: dict[str, torch.Tensor] = {}
        for step in range(STEPS):
            optimizer.zero_grad()
            for part in range(3):
                both_ways(model, 3 * step + part, rank).backward()
                for name, grad in mean_gradients(both_ways, 3 * step + part, world).items():
                    true[name] = true.get(name, 0) + grad
            for name, grad in grads(model).items():
                applied[name] = applied.get(name, 0) + grad
            optimizer.step()
        stats = handle.stats()
        assert stats["steps"] == stats["compressed_steps"] == 3 * STEPS
        for name, total in applied_and_owed(handle, applied, world).items():
            torch.testing.assert_close(total, true[name], atol=5e-5, rtol=1e-4, msg=f"optimizer={given} {name}")


@pytest.mark.full
def test_accumulated_backwards_are_used_by_the_optimizer() -> None:
    spawn(body_accumulated, 2, timeout=200)


def body_dropped(rank: int, world: int) -> None:
    """Drop all gradients of some steps. The reduction rolls these steps back, and keeps the others."""
    place = replicas(world)
    for loss in (experts, crossed):
        for first in ("", "set_requires_gradient_sync", "set_requires_all_reduce"):
            model = sharded(place["mesh"])
            optimizer = torch.optim.SGD(model.parameters(), lr=0.0)  # the parameters of mean_gradients()
            handle = commhooks.attach(model, POWERSGD, process_group=place["group"], optimizer=optimizer, timeout=30)
            applied: dict[str, torch.Tensor] = {}
            true: dict[str, torch.Tensor] = {}
            for step in range(6):
                optimizer.zero_grad()
                if first:
                    getattr(model, first)(False)
                    loss(model, step + 10, rank).backward()
                    getattr(model, first)(True)
                loss(model, step, rank).backward()
                if step in (1, 4):
                    continue
                for name, grad in grads(model).items():
                    applied[name] = applied.get(name, 0) + grad
                for number in (step, step + 10) if first else (step,):
                    for name, grad in mean_gradients(loss, number, world).items():
                        true[name] = true.get(name, 0) + grad
                optimizer.step()
            case = f"{loss.__name__} {first}"
            for name, total in applied_and_owed(handle, applied, world).items():
                torch.testing.assert_close(total, true[name], atol=5e-5, rtol=1e-4, msg=f"{case} {name}")
            assert handle.state.step == 4, case
            loss(model, 6, rank).backward()
            model.blocks[0].zero_grad()  # the other gradients stay, so the engine cannot know if the step counts
            with pytest.raises(StateError, match="gradients of the last step 2 were dropped"):
                loss(model, 7, rank).backward()


@pytest.mark.full
def test_dropped_gradients_roll_their_steps_back() -> None:
    spawn(body_dropped, 2, timeout=200)


def body_thawed(rank: int, world: int) -> None:
    """Train a block that was frozen at attach with a separate optimizer. Its steps use the gradients."""
    place = replicas(world)
    model = sharded(place["mesh"])
    model.blocks[2].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = commhooks.attach(model, POWERSGD, process_group=place["group"], optimizer=optimizer, timeout=30)

    def backward(step: int) -> None:
        model.zero_grad()
        model(data(step, rank)).square().mean().backward()

    backward(0)
    optimizer.step()
    model.requires_grad_(False)
    model.blocks[2].requires_grad_(True)
    late = torch.optim.SGD(model.blocks[2].parameters(), lr=0.1)
    for step in range(1, 4):
        backward(step)
        late.step()
    backward(4)  # dropped
    backward(5)
    late.step()
    handle.commit()
    assert handle.state.step == 5
    assert any(name.startswith("blocks.2") for name, _, _ in handle.state.entries())


def test_an_optimizer_of_thawed_parameters_uses_their_gradients() -> None:
    spawn(body_thawed, 2, timeout=100)


def body_detached(rank: int, world: int) -> None:
    """Check that plain averaging after detach() keeps the order of groups, also in another dtype."""
    place = replicas(world)
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float16)  # torch divides after its hook
    for options in ({}, {"mp_policy": policy}):
        model = sharded(place["mesh"], **options)
        handle = commhooks.attach(model, POWERSGD, process_group=place["group"], timeout=30)
        crossed(model, 0, rank).backward()
        handle.detach()
        for step in range(1, 3):
            model.zero_grad()
            experts(model, step, rank).backward()
            for name, grad in mean_gradients(experts, step, world).items():
                torch.testing.assert_close(grads(model)[name], grad, atol=2e-3 if options else 1e-6, rtol=2e-2)


class Fails(commhooks.Reduction):
    """Averages. Raises on one rank while armed."""

    name, lossy, armed = "fails", True, False

    def run(self, bucket: Bucket, ctx: StepContext) -> Iterator[Requests]:
        if self.armed and not bucket.storage.is_meta and ctx.rank == 1:
            raise ValueError("no encode")
        yield tuple(AllReduce(run) for run in bucket.segments())


def pipeline(model: Any) -> Callable[[torch.Tensor], None]:
    """Run torch's own pipeline over one stage. It reduces after its last backward."""
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    stage = PipelineStage(model, 0, 1, torch.device("cpu"), group=alone)
    schedule = ScheduleGPipe(stage, 3, loss_fn=lambda out, target: out.square().mean())
    return lambda x: schedule.step(x, target=torch.zeros_like(x))


def by_hand(model: Any) -> Callable[[torch.Tensor], None]:
    """On torch 2.15 the user declares the end of the backward."""
    model.set_manual_backward_finalization(True)

    def step(x: torch.Tensor) -> None:
        model.set_requires_gradient_sync(False)
        for part in x.chunk(3)[:2]:
            model(part).square().mean().div(3).backward()
        model.set_requires_gradient_sync(True)
        model(x.chunk(3)[2]).square().mean().div(3).backward()
        model.finalize_backward()

    return step


def in_chunks(model: Any) -> Callable[[torch.Tensor], None]:
    """Run the body once, and the last block with a separate backward for each part of the loss."""

    def step(x: torch.Tensor) -> None:
        body = model(x, (0, 1))
        cut = body.detach().requires_grad_()
        for part in cut.chunk(3):
            (part + torch.tanh(model.blocks[2](part))).square().mean().div(3).backward()
        body.backward(cut.grad)

    return step


def body_ends(rank: int, world: int) -> None:
    place = replicas(world)
    ways = [pipeline, in_chunks]
    if hasattr(fully_shard(nn.Linear(1, 1), mesh=place["mesh"]), "set_manual_backward_finalization"):
        ways.append(by_hand)
    for way in ways:
        model, reduction = sharded(place["mesh"]), Fails()
        run = way(model)
        handle = commhooks.attach(model, reduction, process_group=place["group"], timeout=30)
        for step in range(3):
            model.zero_grad()
            run(data(step, rank))
            ref = Net()
            sum(ref(data(step, other)).square().mean() / world for other in range(world)).backward()
            for name, p in ref.named_parameters():
                torch.testing.assert_close(whole(dict(model.named_parameters())[name].grad), p.grad)
            ended = step + 1 if way is not in_chunks else 4 * (step + 1)
            assert handle.stats()["steps"] == ended, way.__name__
            assert not handle.binding.engine.in_step
            assert not handle.binding.engine.step.kept
        handle.commit()
        assert handle.state.step == ended
        reduction.armed = True
        with pytest.raises(ValueError if rank == 1 else RemoteHookError, match="no encode"):
            run(data(9, rank))


def body_cut_short(rank: int, world: int) -> None:
    """After an exception FSDP2 ends no later backward until reset_iter_state()."""
    place = replicas(world)
    model = sharded(place["mesh"])
    handle = commhooks.attach(model, POWERSGD, process_group=place["group"], timeout=30)
    both_ways(model, 0, rank).backward()
    before = grads(model)
    handle.commit()
    saved = handle.state_dict()

    def burst(grad: torch.Tensor) -> None:
        raise RuntimeError("out of memory")

    x = model(data(1, rank))
    x.grad_fn.next_functions[0][0].register_hook(lambda *_: burst(x))
    with pytest.raises(RuntimeError, match="out of memory"):
        x.square().mean().backward()
    with pytest.raises(HookResultError, match="reset_iter_state"):
        model(data(1, rank))
    if not hasattr(model, "reset_iter_state"):
        return
    model.reset_iter_state()
    handle.load_state_dict(saved)
    both_ways(model, 1, rank).backward()
    assert handle.stats()["steps"] == 2
    assert all(not torch.equal(g, before[name]) for name, g in grads(model).items())


def test_pipelines_chunks_and_manual_ends_are_steps() -> None:
    spawn(body_ends, 2, timeout=200)


def test_detached_models_keep_to_the_turns() -> None:
    spawn(body_detached, 2, timeout=200)


def test_a_backward_cut_short() -> None:
    spawn(body_cut_short, 2, timeout=200)
