"""A handle on a DDP model: its life time, frozen and replaced parameters, and parameters of two dtypes."""

import copy
import gc
import math
import pickle
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

import ch_ddp
import commhooks
from ch_ddp.hook_function import as_hook
from ch_powersgd import PowerSGDState, powerSGD_hook
from ch_testing import spawn
from commhooks import AttachError, HookState, Plain
from commhooks.adapters.optimizer_steps import watching

pytestmark = [pytest.mark.timeout(150), pytest.mark.gloo]


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


# -- life time


def trained(model: DistributedDataParallel, optimizer: torch.optim.Optimizer | None = None) -> None:
    for _ in range(3):
        model(torch.ones(1, 64)).sum().backward()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()


def parts(model: DistributedDataParallel, handle: commhooks.CommHook) -> list[object]:
    binding: Any = handle.binding
    found = [binding, binding.driver, binding.engine, handle.hook_state, model.module[0].weight]
    return [part for part in found if part is not None]


def wrapped(**options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), **options)


def attached(hook: Any, model: DistributedDataParallel | None = None, **options: Any) -> list[object]:
    model = model if model is not None else wrapped()
    handle = commhooks.attach(model, hook, single_process=True, **options)
    trained(model)
    return parts(model, handle)


def with_optimizer() -> list[object]:
    model = wrapped()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    handle = commhooks.attach(model, "powersgd(rank=4)", optimizer=optimizer, single_process=True)
    trained(model, optimizer)
    return parts(model, handle)


def overlapped() -> list[object]:
    model = wrapped()
    handle = commhooks.attach(model, "allreduce", single_process=True)
    optimizer = ch_ddp.OverlappedOptimizer(torch.optim.SGD(model.parameters(), 0.1), handle)
    trained(model, optimizer)
    return parts(model, handle)


def detached() -> list[object]:
    model = wrapped()
    handle = commhooks.attach(model, "powersgd(rank=4)", single_process=True)
    trained(model)
    found = parts(model, handle)
    handle.detach()
    trained(model)
    return found


def after_an_error() -> list[object]:
    model = wrapped()
    handle = commhooks.attach(model, "powersgd(rank=4)", single_process=True)
    trained(model)
    with pytest.raises(AttachError):
        model.module(torch.ones(1, 64)).sum().backward()
    return parts(model, handle)


def bare(state: Any, hook: Any) -> list[object]:
    model = wrapped(find_unused_parameters=True)
    model.register_comm_hook(state, hook)
    trained(model)
    return [model.module[0].weight, *([state] if state is not None else [])]


WAYS: dict[str, Callable[[], list[object]]] = {
    "allreduce": lambda: attached("allreduce"),
    "powersgd": lambda: attached("powersgd(rank=4)"),
    "unused parameters": lambda: attached("powersgd(rank=4)", wrapped(find_unused_parameters=True)),
    "a static graph": lambda: attached("powersgd(rank=4)", wrapped(static_graph=True)),
    "comparison of ranks": lambda: attached("powersgd(rank=4)", check_ranks_every=1),
    "a foreign hook": lambda: attached(bf16_compress_hook, check_ranks_every=1),
    "optimizer=": with_optimizer,
    "OverlappedOptimizer": overlapped,
    "detached": detached,
    "after an error": after_an_error,
    "bare": lambda: bare(None, ch_ddp.bf16_compress_hook),
    "bare with a state": lambda: bare(HookState(), as_hook(Plain())),
    "bare powersgd": lambda: bare(PowerSGDState(None, 1, start_powerSGD_iter=2), powerSGD_hook),
}


def test_detach_ends_the_watch_of_the_optimizer(alone: None) -> None:
    gc.collect()  # a watch of an earlier test may still wait for it
    before, model = watching(), wrapped()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    handle = commhooks.attach(model, "powersgd(rank=4)", optimizer=optimizer, single_process=True)
    trained(model, optimizer)
    alive = handle.binding  # a binding that is freed takes its watch with it
    assert watching() != before
    handle.detach()
    assert watching() == before
    assert alive is not None


@pytest.mark.parametrize(("gradients", "steps"), [("wait", 5), ("are gone", 3), ("are infinite", 3)])
def test_gradients_that_wait_at_detach_count_if_they_are_finite(alone: None, gradients: str, steps: int) -> None:
    """Otherwise a handle that is attached again would send the residual of this step once more."""
    model = wrapped()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    handle = commhooks.attach(model, "powersgd(rank=4)", optimizer=optimizer, single_process=True)
    trained(model, optimizer)
    for factor in (1.0, math.inf if gradients == "are infinite" else 1.0):
        (model(torch.ones(1, 64)).sum() * factor).backward()
    if gradients == "are gone":
        optimizer.zero_grad()
    handle.detach()
    assert handle.hook_state is not None
    assert handle.hook_state.step == steps


@pytest.mark.parametrize("view", [False, True])
def test_a_backward_that_raises_after_the_last_bucket_does_not_count(alone: None, view: bool) -> None:
    """DDP writes the averages at the end of the backward."""

    def stop(_: torch.Tensor) -> None:
        raise ArithmeticError("in the graph of the input")

    model = wrapped(gradient_as_bucket_view=view)
    handle = commhooks.attach(model, "powersgd(rank=4)", single_process=True)
    trained(model)
    x = torch.ones(1, 64, requires_grad=True) * 1
    x.register_hook(stop)
    with pytest.raises(ArithmeticError):
        model(x).sum().backward()
    handle.detach()
    assert handle.hook_state is not None
    assert handle.hook_state.step == 3


@pytest.mark.timeout(30)
def test_a_hook_is_not_detached_between_two_buckets(alone: None) -> None:
    model = wrapped(bucket_cap_mb=0.001)
    handle = commhooks.attach(model, "powersgd(rank=4)", single_process=True)
    trained(model)
    early = model.module[0].weight.register_hook(lambda _: handle.detach())
    with pytest.raises(AttachError, match="after the backward"):
        model(torch.ones(1, 64)).sum().backward()
    early.remove()
    handle.detach()


def test_a_module_with_a_hook_is_pickled_and_copied(alone: None) -> None:
    model, scaler = wrapped(), torch.amp.GradScaler("cpu")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    commhooks.attach(model, "powersgd(rank=4)", optimizer=optimizer, scaler=scaler, single_process=True)
    scaler.scale(model(torch.ones(1, 64)).sum()).backward()
    for twin in (pickle.loads(pickle.dumps(model.module)), copy.deepcopy(model.module)):
        assert torch.equal(twin(torch.ones(1, 64)), model.module(torch.ones(1, 64)))


@pytest.mark.parametrize(
    "way",
    [
        way if way in ("powersgd", "optimizer=", "bare powersgd") else pytest.param(way, marks=pytest.mark.full)
        for way in WAYS
    ],
)
def test_a_dropped_model_is_freed_without_a_garbage_collection(alone: None, way: str) -> None:
    WAYS[way]()  # what torch imports and caches here is not of this model
    gc.collect()
    gc.disable()
    try:
        references = [(type(part).__name__, weakref.ref(part)) for part in WAYS[way]()]
        assert [name for name, reference in references if reference() is not None] == []
    finally:
        gc.enable()


def test_a_module_that_outlives_its_wrapper_keeps_no_hook(alone: None) -> None:
    module = nn.Sequential(nn.Linear(64, 64))
    attached("powersgd(rank=4)", DistributedDataParallel(module))
    assert not module._forward_hooks
    assert not module._forward_pre_hooks
    assert not any(p._post_accumulate_grad_hooks for p in module.parameters())


# -- frozen and replaced parameters


def critic(rank: int, world: int) -> tuple[list[str], bool]:
    """Train as a GAN does, which freezes its critic in each half step of the generator."""
    found, equal = [], True
    for hook in ("quant4", "powersgd(rank=2, min_compression_rate=1)"):
        torch.manual_seed(0)
        model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8)))
        model.requires_grad_(False)
        handle = commhooks.attach(model, hook)
        for step in range(3):
            x = torch.randn(4, 64, generator=torch.Generator().manual_seed(10 * step + rank)).requires_grad_()
            model(x).sum().backward()
            model.requires_grad_(True)
            model(x.detach()).square().mean().backward()
            rows = [torch.empty_like(model.module[0].weight) for _ in range(world)]
            dist.all_gather(rows, model.module[0].weight.grad)
            equal = equal and torch.equal(rows[0], rows[1])
            model.zero_grad()
            model.requires_grad_(False)
        found.append(f"{handle.stats()['compressed_steps']:.0f} of {handle.stats()['steps']:.0f}, {len(handle.plan())}")
    return found, equal


def test_a_model_that_is_frozen_at_attach_is_compressed_once_it_is_thawed() -> None:
    assert spawn(critic, 2) == [(["3 of 3, 4"] * 2, True)] * 2


def frozen_bare(rank: int, world: int) -> float:
    model = wrapped(find_unused_parameters=True)
    model.module[0].weight.requires_grad_(False)  # DDP still has it in a bucket
    state = PowerSGDState(None, 1, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook)
    trained(model)
    return float(state.step)


def test_a_bare_hook_finds_the_model_of_a_frozen_parameter() -> None:
    assert spawn(frozen_bare, 2) == [2.0, 2.0]


def test_a_model_whose_parameters_were_replaced_is_refused(alone: None) -> None:
    model = wrapped()
    model.module[0] = nn.Linear(64, 64)
    with pytest.raises(AttachError, match="DDP averages 4 parameters, and 2 of them are in the model"):
        commhooks.attach(model, "allreduce", single_process=True)


def test_sparse_gradients_have_a_layout_before_the_first_backward(alone: None) -> None:
    net = nn.Sequential(nn.Embedding(9, 8, sparse=True), nn.Linear(8, 8), nn.Linear(8, 8))
    net[1].requires_grad_(False)
    handle = commhooks.attach(DistributedDataParallel(net), "allreduce", single_process=True)
    assert [row.name for row in handle.plan()] == ["0.weight", "2.weight", "2.bias"]


# -- two dtypes


class Mixed(nn.Module):
    def __init__(self, body: torch.dtype, head: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(256, 256, bias=False, dtype=body)
        self.head = nn.Linear(256, 2, bias=False, dtype=head)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(self.body(x.to(self.body.weight.dtype)).to(self.head.weight.dtype))
        return y.float()


def mixed(rank: int, world: int, body: torch.dtype, head: torch.dtype, hook: str) -> tuple[bool, bool, float, float]:
    model = DistributedDataParallel(Mixed(body, head))
    handle = commhooks.attach(model, hook)
    warned, planned = handle.report().warnings, handle.payload_per_step()
    for _ in range(2):
        model(torch.ones(4, 256)).sum().backward()
    report = handle.report()
    sent = [any("never compresses" in line for line in lines) for lines in (warned, report.warnings)]
    gradients = sum(p.numel() * p.element_size() for p in model.parameters())
    assert report.total.gradient_bytes == gradients
    return sent[0], sent[1], planned, handle.stats()["payload_bytes"] / 2


@pytest.mark.parametrize(
    ("body", "head", "hook", "never", "payload"),
    [
        (torch.float32, torch.bfloat16, "bf16_compress", False, 2 * 256 * 258),
        (torch.bfloat16, torch.float32, "bf16_compress", True, 2 * 256 * 258),
        (torch.float32, torch.float64, "powersgd(rank=2)", False, 4 * 2 * 512 + 8 * 512),
    ],
)
def test_each_parameter_is_judged_by_its_own_dtype(
    body: torch.dtype, head: torch.dtype, hook: str, never: bool, payload: int
) -> None:
    assert spawn(mixed, 2, body, head, hook) == [(never, never, payload, payload)] * 2


def foreign_bytes(model: DistributedDataParallel) -> int:
    handle = commhooks.attach(model, bf16_compress_hook, single_process=True)
    return handle.report().total.gradient_bytes


def test_a_foreign_hook_reports_the_bytes_of_each_dtype(alone: None) -> None:
    assert foreign_bytes(DistributedDataParallel(Mixed(torch.float32, torch.bfloat16))) == 4 * 256 * 256 + 2 * 512
