"""Every optimizer of ours that wraps another one is an optimizer for torch's schedulers, frameworks
and a GradScaler.
"""

import copy
import inspect
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.optim import Optimizer, lr_scheduler, swa_utils

import ch_ddp
import ch_ft
import ch_testing
import commhooks

STEPS = 8


class Counting(ch_ddp.ModelAverager):
    def average_parameters(self, params: Any) -> None:
        self.step += 1


@pytest.fixture(params=["PostLocalSGDOptimizer", "OverlappedOptimizer", "OptimizerWrapper"])
def wrap(request: pytest.FixtureRequest) -> Iterator[Callable[[Optimizer, torch.nn.Module], Optimizer]]:
    """Return a function that wraps an optimizer of a model."""
    if request.param == "PostLocalSGDOptimizer":
        yield lambda optimizer, model: ch_ddp.PostLocalSGDOptimizer(optimizer, Counting())
    elif request.param == "OptimizerWrapper":
        with ch_testing.SimulatedCluster() as cluster:
            yield lambda optimizer, model: ch_ft.OptimizerWrapper(cluster.join("a"), optimizer)
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:

            def overlapped(optimizer: Optimizer, model: torch.nn.Module) -> Optimizer:
                ddp = torch.nn.parallel.DistributedDataParallel(model)
                return ch_ddp.OverlappedOptimizer(optimizer, commhooks.attach(ddp, "allreduce"))

            yield overlapped
        finally:
            dist.destroy_process_group()


MAKERS: dict[str, Callable[[Any], Any]] = {
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.9)], optimizer=o
    ),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=2),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 4]),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda epoch: 0.9),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, STEPS + 1),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "SWALR": lambda o: swa_utils.SWALR(o, 0.05, anneal_epochs=3),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.9)], milestones=[3]
    ),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
}
"""For those that need more than an optimizer."""

EVERY = sorted(
    name
    for name, kind in {**vars(lr_scheduler), "SWALR": swa_utils.SWALR}.items()
    if inspect.isclass(kind) and issubclass(kind, lr_scheduler.LRScheduler) and not name.startswith("_")
    if name not in ("LRScheduler", "_LRScheduler")
)


def settings(optimizer: Optimizer) -> list[tuple[Any, ...]]:
    """Return the settings that schedulers change."""
    return [(group["lr"], group.get("momentum"), group.get("betas")) for group in optimizer.param_groups]


def trained(model: torch.nn.Module, optimizer: Optimizer, scheduler: Any, inner: Optimizer) -> list[Any]:
    seen: list[Any] = []
    for step in range(STEPS):
        optimizer.zero_grad()
        model(torch.ones(1, 3) * (step + 1)).sum().backward()
        optimizer.step()
        if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
            scheduler.step(1.0 + step // 3)
        else:
            scheduler.step()
        seen.append((settings(inner), [p.detach().clone() for p in model.parameters()]))
    return seen


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
def test_every_scheduler_of_torch(wrap: Any, name: str, kind: str) -> None:
    make = MAKERS.get(name) or getattr(lr_scheduler, name)
    options = {"lr": 0.1, **({"momentum": 0.9} if kind == "SGD" else {})}
    model = torch.nn.Linear(3, 2)
    plain_model = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # "lr_scheduler.step() before optimizer.step()"
        warnings.filterwarnings("ignore", message=".*epoch parameter in `scheduler.step")  # SequentialLR's own
        plain = getattr(torch.optim, kind)(plain_model.parameters(), **options)
        inner = getattr(torch.optim, kind)(model.parameters(), **options)
        optimizer = wrap(inner, model)
        wanted = trained(plain_model, plain, make(plain), plain)
        found = trained(model, optimizer, make(optimizer), inner)
    assert [lr for lr, _ in found] == [lr for lr, _ in wanted]
    assert len({str(lr) for lr, _ in found}) > 1  # the scheduler changed the settings
    for (_, mine), (_, theirs) in zip(found, wanted, strict=True):
        assert all(map(torch.equal, mine, theirs))


def test_it_is_an_optimizer_that_shares_everything(wrap: Any) -> None:
    model = torch.nn.Linear(3, 2)
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = wrap(inner, model)
    assert isinstance(optimizer, Optimizer)
    assert optimizer.defaults is inner.defaults
    assert optimizer.param_groups is inner.param_groups
    assert optimizer.state is inner.state
    optimizer.param_groups = list(optimizer.param_groups)  # Accelerate does the same
    optimizer.state = copy.copy(optimizer.state)
    assert optimizer.param_groups is inner.param_groups
    assert optimizer.state is inner.state
    optimizer.zero_grad()
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(saved)
    assert optimizer.state is inner.state
    assert len(inner.state) == 2
    optimizer.zero_grad(set_to_none=False)
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())


def test_step_hooks_run_once_a_step(wrap: Any) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.1), model)
    ran: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: ran.append("pre"))
    optimizer.register_step_post_hook(lambda *_: ran.append("post"))
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    assert ran == ["pre", "post"] * 2
