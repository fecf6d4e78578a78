"""``commhooks run --outer`` on FSDP2 with replicas gives the bits of ``OuterOptimizer`` between replicas by hand.

By hand, the script shards over the ranks of a replica alone, and gives the optimizer the group between replicas.
"""

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import ch_outer
import commhooks
from ch_run.auto_attach import auto_attach
from ch_run.import_watch import watch
from ch_run.settings import Settings
from ch_testing import spawn

from .kit import SCRIPTS, run

pytest.importorskip("ch_fsdp")
pytestmark = [pytest.mark.gloo, pytest.mark.timeout(300)]
OPTIONS: dict[str, Any] = {"every": 3, "rate": 0.7, "momentum": 0.9}
NAMES = ("between", "inside")
Optim = torch.optim.Optimizer


class Net(nn.Module):
    """A model with uneven shards, BatchNorm, and a branch that every other step uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(6, 7), nn.BatchNorm1d(7)
        self.branch, self.last = nn.Linear(7, 7), nn.Linear(7, 1)

    def forward(self, x: torch.Tensor, branch: bool = True) -> torch.Tensor:
        x = self.norm(self.first(x)).tanh()
        return self.last(self.branch(x).tanh() if branch else x)


def sharded(mesh: DeviceMesh | None) -> nn.Module:
    from torch.distributed.fsdp import fully_shard  # after watch(), which replaces it

    torch.manual_seed(0)
    model = Net()
    for part in (model.first, model.branch):
        fully_shard(part, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def loss_of(model: nn.Module, rank: int, step: int, **options: bool) -> torch.Tensor:
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(1000 * rank + step))
    return (model(x, **options)[:, 0] - x.sum(1).sin()).square().mean()


def local(tensor: torch.Tensor) -> torch.Tensor:
    found: Any = tensor.detach()
    return (found.to_local() if hasattr(found, "to_local") else found).clone()


def watching(text: str) -> None:
    os.environ.update(Settings("", outer=text).environ())
    watch()
    auto_attach.cache_clear()


# -- scripts


def plain(rank: int, model: nn.Module, outer: Callable[..., Optim]) -> None:
    optimizer = outer(torch.optim.AdamW(model.parameters(), lr=0.01), model)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    for step in range(10):
        optimizer.zero_grad()
        loss_of(model, rank, step, branch=step % 2 == 0).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        schedule.step()


def accumulating(rank: int, model: Any, outer: Callable[..., Optim]) -> None:
    """Accumulate without messages, then with partial sums, as FSDP2 documents it for replicas."""
    optimizer = outer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model)
    for step in range(7):
        for part in range(3):
            model.set_requires_gradient_sync(part > 0)
            model.set_requires_all_reduce(part == 2)
            (loss_of(model, rank, 10 * step + part) / 3).backward()
        optimizer.step()
        optimizer.zero_grad()


def divided(rank: int, model: Any, outer: Callable[..., Optim]) -> None:
    """Divide the sum over all ranks by a factor, here the number of the ranks."""
    model.set_gradient_divide_factor(float(model.divisor))
    plain(rank, model, outer)


def scaled(rank: int, model: nn.Module, outer: Callable[..., Optim]) -> None:
    """A GradScaler skips steps of one replica only, among them the first of a run and the last of a round."""
    optimizer = outer(torch.optim.AdamW(model.parameters(), lr=0.01), model)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    for step in range(9):
        optimizer.zero_grad()
        loss = loss_of(model, rank, step)
        scaler.scale(loss * (float("inf") if rank >= 2 and step in (0, 5) else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()


CASES: dict[str, tuple[Callable[..., None], str]] = {
    "plain": (plain, "diloco"),
    "streaming": (plain, "streaming(fragments=2, overlap=1, exchange=quant4)"),
    "accumulating": (accumulating, "diloco(exchange='quant8(exempt=False)')"),
    "divided": (divided, "local_sgd"),
    "scaler": (scaled, "diloco"),
}


def expression(text: str) -> str:
    from commhooks.registry.expression import unparse

    node = commhooks.canonical(text)
    node["config"] = {**OPTIONS, **node["config"]}
    return unparse(node)


def make_by_hand(text: str, group: dist.ProcessGroup, made: list[Any], optim: Optim, model: nn.Module) -> Optim:
    spec, options = commhooks.registry.registry.REGISTRY.outer(text)
    made.append(getattr(ch_outer, spec.target.partition(":")[2])(optim, model, process_group=group, **options))
    return made[0]


def bits(rank: int, world: int, names: list[str]) -> dict[str, str]:
    wrong = {}
    mesh = init_device_mesh(torch.get_default_device().type, (2, 2), mesh_dim_names=NAMES)
    for name in names:
        script, text = CASES[name]
        text = expression(text)
        watching(text)
        ours: Any = sharded(mesh)
        ours.divisor = 4
        script(rank, ours, lambda optim, model: optim)
        [found] = auto_attach().models
        del os.environ["COMMHOOKS_OUTER"]
        auto_attach.cache_clear()
        hand: Any = sharded(mesh["inside"])
        hand.divisor, made = 2, list[Any]()
        script(rank, hand, partial(make_by_hand, text, mesh["between"].get_group(), made))
        if (found.outer.count, found.outer.landed) != (made[0].count, made[0].landed) or not made[0].landed:
            wrong[name] = f"{found.outer.count}, {found.outer.landed} against {made[0].count}, {made[0].landed}"
        pairs = zip([*ours.parameters(), *ours.buffers()], [*hand.parameters(), *hand.buffers()], strict=True)
        if odd := [i for i, (one, other) in enumerate(pairs) if not torch.equal(local(one), local(other))]:
            wrong[name] = f"tensors {odd} differ"
    return wrong


@pytest.mark.parametrize(
    "names", [["plain"], pytest.param(list(CASES)[1:], marks=pytest.mark.full)], ids=["plain", "others"]
)
def test_an_unchanged_script_has_the_bits_of_an_outer_optimizer_between_replicas(names: list[str]) -> None:
    assert spawn(bits, 4, names, timeout=200) == [{}] * 4


def between_rounds(rank: int, world: int, declared: bool) -> tuple[list[bool], int]:
    """Return if all ranks hold one model after each step, and the bytes that went between replicas."""
    watching("diloco(every=3, steps=5)")
    mesh = init_device_mesh(torch.get_default_device().type, (2, 2), mesh_dim_names=("replicate", "shard"))
    model = sharded(mesh["shard"] if declared else mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    same = []
    for step in range(5):
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()
        whole = [p.full_tensor().flatten().tolist() for p in model.state_dict().values() if hasattr(p, "full_tensor")]
        everyone: list[Any] = [None] * world
        dist.all_gather_object(everyone, whole)
        same.append(all(one == everyone[0] for one in everyone))
    [found] = auto_attach().models
    return same, int(found.outer.stats()["payload_bytes"])


@pytest.mark.parametrize("declared", [False, pytest.param(True, marks=pytest.mark.full)], ids=["mesh", "name"])
def test_all_ranks_hold_one_model_at_the_end_of_a_round_and_each_rank_sends_its_shard(declared: bool) -> None:
    """Replicas are a dimension of the model's mesh, or of the root mesh by its name."""
    results = spawn(between_rounds, 4, declared, timeout=120)
    assert [same for same, _ in results] == [[False, False, True, False, True]] * 4
    params = sum(p.numel() for p in Net().parameters())
    buffers = 2 * 14 * 8  # two averages of two BatchNorm buffers as fp64
    assert results[0][1] + results[1][1] == 2 * params * 4 + 2 * buffers


def refused(rank: int, world: int) -> list[str]:
    def attempt(body: Callable[[], nn.Module], expected: str, outer: str = "diloco") -> str:
        watching(expression(outer) if outer == "diloco" else outer)
        try:
            model = body()
            optimizer = torch.optim.SGD(model.parameters())
            loss_of(model, rank, 0)
            del optimizer
        except commhooks.CommHooksError as error:
            return "" if expected in str(error) else f"{expected!r} is not in {error}"
        notes = "; ".join(auto_attach().notes)
        return "" if expected in notes else f"{expected!r} is not in {notes!r}"

    def own_hook() -> nn.Module:
        model: Any = sharded(mesh)
        model.set_all_reduce_hook(print)
        return model  # type: ignore[no-any-return]

    def attached() -> nn.Module:
        model = sharded(mesh)
        commhooks.attach(model, "quant8")
        return model

    mesh = init_device_mesh(torch.get_default_device().type, (2, 1), mesh_dim_names=NAMES)
    found = [
        attempt(
            lambda: sharded(init_device_mesh(torch.get_default_device().type, (2,))), "has none: all ranks hold parts"
        ),
        attempt(own_hook, "hook of the script's own, which stays"),
        attempt(attached, "quant8 between replicas"),
    ]
    return [text for text in found if text]


@pytest.mark.full
def test_it_refuses_by_name() -> None:
    assert spawn(refused, 2, timeout=120) == [[]] * 2


# -- kill and resume


def weights(folder: Path) -> list[torch.Tensor]:
    return list(torch.load(folder / "weights.pt", weights_only=True).values())


@pytest.mark.full
@pytest.mark.parametrize(
    ("shards", "outer", "save"),
    [
        (2, "diloco(every=2, steps=8, exchange='quant4(block=16, error_feedback=True, exempt=False)')", 4),
        pytest.param(2, "diloco(every=3, steps=8)", 6, marks=pytest.mark.full),
        pytest.param(1, "diloco(every=4, steps=8)", 4, marks=pytest.mark.full),
    ],
)
def test_killed_and_resumed_with_the_same_bits(tmp_path: Path, shards: int, outer: str, save: int) -> None:
    text = (SCRIPTS / "fsdp2_loop.py").read_text().replace("dist.get_world_size(), 1", f"2, {shards}")
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for one in (whole, killed):
        one.mkdir()
    given: dict[str, Any] = {"ranks": 2 * shards, "outer": outer}
    assert run(whole, text, "--save", save, **given).report["models"][0]["steps"] == 8
    died = run(killed, text, "--save", save, "--kill", 7, state="state", check=False, **given)
    assert died.code != 0 and not (killed / "weights.pt").exists()
    done = run(killed, text, "--save", save, "--resume", state="state", **given)
    assert f"its state after step {save} is resumed from" in done.err or done.report["models"][0]["steps"] == 8
    assert all(torch.equal(a, b) for a, b in zip(weights(whole), weights(killed), strict=True))


@pytest.mark.full
def test_a_trace_has_the_rounds_of_all_ranks_of_the_mesh(tmp_path: Path) -> None:
    text = (SCRIPTS / "fsdp2_loop.py").read_text().replace("dist.get_world_size(), 1", "2, 2")
    done = run(tmp_path, text, ranks=4, outer="diloco(every=4)", trace="traces")
    [file] = (tmp_path / "traces").iterdir()
    data = json.loads(file.read_text())
    assert data["otherData"]["ranks"] == [0, 1, 2, 3]
    inner = [event for event in data["traceEvents"] if event["name"] == "inner steps"]
    assert len({event["pid"] for event in inner}) == 4
    assert done.report["models"][0]["trace"]["summary"]["ranks"] == [0, 1, 2, 3]
