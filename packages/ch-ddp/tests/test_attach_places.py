"""Attach finds models inside wrappers of frameworks and torch.compile, and works in a single process."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import commhooks
from ch_testing import SimulatedRanks, spawn

HOOK = "powersgd(rank=2)"


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def net() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))


def ddp(inside: Any = None) -> DistributedDataParallel:
    return DistributedDataParallel(net() if inside is None else inside, bucket_cap_mb=0.01)


def compiled(model: torch.nn.Module) -> Any:
    return torch.compile(model, backend="eager")


def compiled_steps(rank: int, world: int, order: str) -> float:
    layers = torch.nn.Sequential(torch.nn.Linear(64, 4200), torch.nn.Linear(4200, 64))  # two of DDP's smallest buckets
    inside = layers if order == "compiled outside" else compiled(layers)
    wrapped = DistributedDataParallel(inside, bucket_cap_mb=1)
    model: Any = wrapped if order == "compiled inside" else compiled(wrapped)
    handle = commhooks.attach(model, HOOK, single_process=True)
    for _ in range(2):
        model(torch.ones(2, 64)).square().mean().backward()
    return handle.stats()["compressed_steps"]


@pytest.mark.parametrize(
    "order", ["compiled outside", *(pytest.param(o, marks=pytest.mark.full) for o in ("compiled inside", "both"))]
)
def test_compiled_in_either_order(order: str) -> None:
    # A separate process, because torch's compiler remembers models of earlier tests.
    assert spawn(compiled_steps, 1, order) == [2]


def fabric_steps(rank: int, world: int) -> tuple[str, int]:
    from lightning import Fabric

    dist.destroy_process_group()
    fabric = Fabric(accelerator="cpu", devices=1, strategy="ddp")
    fabric.launch()
    model = fabric.setup_module(net())
    handle = commhooks.attach(model, HOOK, single_process=True)
    fabric.backward(model(torch.ones(2, 64)).square().mean())
    return type(model).__name__, int(handle.stats()["compressed_steps"])


@pytest.mark.full
def test_a_fabric_module() -> None:
    """Runs in a separate process, because Fabric sets environment variables that make its process a rank."""
    pytest.importorskip("lightning")
    assert spawn(fabric_steps, 1) == [("_FabricModule", 1)]


def test_a_wrapper_without_a_wrapped_model_is_refused() -> None:
    with pytest.raises(commhooks.AttachError, match="OptimizedModule: it is not wrapped for data parallelism"):
        commhooks.attach(compiled(net()), HOOK)


def test_the_refusal_names_the_wrappers_and_no_class_of_ours() -> None:
    with pytest.raises(commhooks.AttachError) as refused:
        commhooks.attach(net(), HOOK)
    text = str(refused.value)
    assert "model = torch.nn.parallel.DistributedDataParallel(model)" in text and "replicate" in text
    assert not {"GradBucket", "FSDPModule", "Manager", "adapter"} & set(text.replace(",", " ").split())
    with pytest.raises(commhooks.AttachError, match="DataParallel: it has one process"):
        commhooks.attach(torch.nn.DataParallel(net()), HOOK)


def test_options_by_keyword() -> None:
    handle = commhooks.attach(ddp(), "powersgd", rank=4, single_process=True)
    assert handle.expr == "powersgd(rank=4)"
    with pytest.raises(commhooks.HookConfigError, match="no option 'rnk'"):
        commhooks.attach(ddp(), "powersgd", rnk=4)
    with pytest.raises(commhooks.HookConfigError, match="options rank need a hook by name"):
        commhooks.attach(ddp(), commhooks.create(HOOK), rank=4)


def gradients(model: DistributedDataParallel) -> list[torch.Tensor]:
    model.zero_grad()
    model(torch.ones(2, 64) * torch.arange(64)).square().mean().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def test_alone_nothing_is_compressed(caplog: pytest.LogCaptureFixture) -> None:
    model, plain = ddp(), ddp()
    handle = commhooks.attach(model, HOOK)
    assert handle.alone
    assert all(torch.equal(a, b) for a, b in zip(gradients(model), gradients(plain), strict=True))
    handle.assert_active()
    assert handle.stats()["steps"] == 1 and handle.stats()["compressed_steps"] == 0
    assert {(row.treatment, row.reason) for row in handle.plan()} == {("plain", "one process: nothing is sent")}
    handle.detach()
    assert not handle.alone
    again = commhooks.attach(model, handle, single_process=True)
    assert not any(torch.equal(a, b) for a, b in zip(gradients(model)[::2], gradients(plain)[::2], strict=True))
    assert again.stats()["compressed_steps"] == 1


def test_alone_a_state_of_several_ranks_stays_unchanged() -> None:
    """A script that resumes and saves may also run alone. It must not lose the loaded state."""
    model = ddp()
    handle = commhooks.attach(model, HOOK)
    shapes = {name: torch.randn(p.shape) for name, p in model.module.named_parameters()}
    two = SimulatedRanks(lambda: commhooks.create(HOOK), 2, shapes)
    two.step([shapes, shapes])
    saved = two.save()[1]
    handle.load_state_dict(saved)
    gradients(model)
    kept = handle.state_dict()
    assert kept["step"] == saved["step"] + 1
    for name, row in saved["entries"].items():
        assert all(torch.equal(kept["entries"][name][field], tensor) for field, tensor in row.items())


def test_alone_a_foreign_function_is_called() -> None:
    calls = []

    def hook(state: object, bucket: commhooks.GradBucket) -> torch.futures.Future[torch.Tensor]:
        calls.append(bucket.index())
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    model = ddp()
    commhooks.attach(model, hook)
    gradients(model)
    assert calls
