"""Handles that come and go on FSDP2: over other parts of the model, and several at once."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import commhooks
from commhooks import HookConfigError
from commhooks.testing import spawn

pytestmark = [pytest.mark.timeout(280), pytest.mark.gloo]

WIDTH, PARTS = 12, 3


def plain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(PARTS)))


def sharded() -> Any:
    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("replicate", "shard"))
    model = plain()
    for part in model:
        fully_shard(part, mesh=mesh["shard"])
    return fully_shard(model, mesh=mesh["shard"])


def data(step: int, rank: int) -> torch.Tensor:
    return torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def compare(model: nn.Module, step: int, rank: int, what: object) -> None:
    """One backward of the whole model; its gradients are the mean over all replicas, of every group."""
    model.zero_grad()
    model(data(step, rank)).square().sum().backward()
    ref = plain()
    world = dist.get_world_size()
    sum(ref(data(step, other)).square().sum() / world for other in range(world)).backward()
    for (name, p), q in zip(model.named_parameters(), ref.parameters(), strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), q.grad, msg=f"{what}, step {step}: {name}")


class Picky(commhooks.Reduction):
    """Refuses the model, after the adapter has made its place."""

    name, lossy = "picky", True

    def check(self, layout: Any) -> None:
        raise HookConfigError("not this model")

    def run(self, bucket: Any, ctx: Any) -> Any:
        yield from ()


def body_other_parts(rank: int, world: int) -> None:
    for between in (False, True):  # whether backwards happen between the handles
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
    """A refused attach to a part leaves the averaging that covers all of the model."""
    model = sharded()
    commhooks.attach(model, "allreduce", timeout=20).detach()
    for part in ("1", ""):
        with pytest.raises(HookConfigError, match="not this model"):
            commhooks.attach(model.get_submodule(part), Picky(), timeout=20)
        for step in range(2):
            compare(model, step, rank, "refused")


def test_handles_over_other_parts_one_after_another() -> None:
    spawn(body_other_parts, 2, timeout=200)


def test_a_refused_handle_over_a_part() -> None:
    spawn(body_refused, 2, timeout=200)


class Halves(nn.Module):
    """Two halves of one shape, which a rank may use in either order, or one of them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.halves = nn.ModuleList(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(2))) for _ in range(2))

    def forward(self, x: torch.Tensor, path: tuple[int, ...]) -> torch.Tensor:
        for number in path:
            x = x + self.halves[number](x)
        return x.square().mean()


def body_two_handles(rank: int, world: int) -> None:
    """Two handles over the same replicas: each rank takes their groups in an order of its own."""
    mesh = init_device_mesh("cpu", (world, 1), mesh_dim_names=("replicate", "shard"))["shard"]
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
