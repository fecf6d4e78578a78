"""`commhooks run --gather`: a hook on the weight gathers of an unchanged FSDP2 script."""

import os
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import commhooks
from ch_run.auto_attach import auto_attach
from ch_run.import_watch import watch
from ch_run.settings import Settings
from ch_testing import spawn

pytest.importorskip("ch_fsdp")
pytestmark = [pytest.mark.timeout(150), pytest.mark.gloo]


def net() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 8))


def begin(hook: str, gather: str, **options: Any) -> None:
    """Begin as ``commhooks run --hook HOOK --gather GATHER`` does."""
    os.environ.update(Settings(hook, gather=gather, **options).environ())
    if not hook:
        os.environ.pop("COMMHOOKS_HOOK", None)
    watch()
    auto_attach.cache_clear()


def sharded(world: int) -> Any:
    from torch.distributed.fsdp import fully_shard  # after watch(), which replaces it

    return fully_shard(net(), mesh=init_device_mesh(torch.get_default_device().type, (world,)))


def train(model: torch.nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(4, 64)).square().mean().backward()
        optimizer.step()


def body(rank: int, world: int) -> None:
    begin("quant4(block=16)", "quant8(block=16)", check_ranks_every=2)
    model = sharded(world)
    train(model)
    models = auto_attach().report()["models"]
    assert [one["hook"] for one in models] == ["quant4(block=16)", "quant8(block=16)"]
    assert [one["stats"]["steps"] for one in models] == [3, 3]
    assert models[1]["stats"]["gather_payload_bytes"] > 0
    replicated = DistributedDataParallel(net())
    train(replicated)
    assert len(auto_attach().models) == 3
    assert any("gathers no weights" in note for note in auto_attach().notes)

    assert not any("--check-ranks-every" in note for note in auto_attach().notes)  # the models say it themselves
    assert "hold different shards" in str(models[0])

    begin("", "quant8(block=16)", check_ranks_every=2)
    other = sharded(world)
    train(other)
    [one] = auto_attach().report()["models"]
    assert one["stats"]["gather_payload_bytes"] > 0
    assert any("--check-ranks-every compares nothing" in note for note in auto_attach().notes)


def body_teacher(rank: int, world: int) -> None:
    """A frozen teacher is sharded in a way that the student's hook does not fit. Its weight gathers are coded."""
    begin("powersgd(rank=2)", "quant8(block=16)")
    teacher, student = sharded(world).requires_grad_(False), DistributedDataParallel(net())
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
    for step in range(3):
        x = torch.randn(4, 64, generator=torch.Generator().manual_seed(10 * step + rank))
        optimizer.zero_grad()
        (student(x) - teacher(x)).square().mean().backward()
        optimizer.step()
    models = auto_attach().report()["models"]
    assert sorted(one["hook"] for one in models) == ["powersgd(rank=2)", "quant8(block=16)"]
    assert all(one["stats"]["wire_bytes"] > 0 for one in models)
    assert any("no trainable parameters" in note for note in auto_attach().notes)


def body_critic(rank: int, world: int) -> None:
    """A critic is frozen in the half of each step that trains the generator, which comes first."""
    begin("quant4(block=16)", "quant8(block=16)")
    critic = sharded(world)
    optimizer = torch.optim.SGD(critic.parameters(), lr=0.1)
    for _ in range(3):
        critic.requires_grad_(False)
        critic(torch.randn(4, 64, requires_grad=True)).mean().backward()
        critic.requires_grad_(True)
        optimizer.zero_grad()
        critic(torch.randn(4, 64)).square().mean().backward()
        optimizer.step()
    models = auto_attach().report()["models"]
    assert [one["hook"] for one in models] == ["quant8(block=16)", "quant4(block=16)"]
    assert models[1]["stats"]["steps"] == 3


def body_outer(rank: int, world: int) -> None:
    begin("", "", outer="diloco(every=2)")
    teacher, student = sharded(world).requires_grad_(False), DistributedDataParallel(net())
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
    for _ in range(4):
        x = torch.randn(4, 64)
        optimizer.zero_grad()
        (student(x) - teacher(x)).square().mean().backward()
        optimizer.step()
    [one] = auto_attach().report()["models"]
    assert one["stats"]["rounds_done"] == 2


def test_a_frozen_teacher_needs_no_hook() -> None:
    spawn(body_teacher, 2, timeout=120)


def test_a_frozen_teacher_needs_no_outer_optimizer() -> None:
    pytest.importorskip("ch_outer")
    spawn(body_outer, 2, timeout=120)


def test_a_model_that_is_frozen_at_first_gets_its_hook_when_it_trains() -> None:
    spawn(body_critic, 2, timeout=120)


def test_weights_and_gradients_are_coded() -> None:
    spawn(body, 2, timeout=120)


def test_settings() -> None:
    Settings("", gather="quant8").check()
    assert Settings("", gather="quant8").environ() == {"COMMHOOKS_GATHER": "quant8"}
    with pytest.raises(commhooks.HookConfigError, match="exclude each other"):
        Settings("", outer="diloco", gather="quant8").check()
    with pytest.raises(commhooks.UnknownHookError):
        Settings("quant4", gather="quant88").check()
