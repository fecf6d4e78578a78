"""No gradient is lost between backward and optimizer. Applied + owed = the sum of all mean gradients, for any number of
steps.

The loss is linear in the weights, so that the gradients are known. With lr = 1 the weights show the applied gradients.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import commhooks
from ch_testing import spawn

pytestmark = [pytest.mark.timeout(180), pytest.mark.gloo]


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.zeros(32, 32)), nn.Parameter(torch.zeros(32, 24))

    def forward(self, wanted: dict[str, torch.Tensor]) -> torch.Tensor:
        return (self.a * wanted["a"]).sum() + (self.b * wanted["b"]).sum()


class Run:
    """One model with PowerSGD, and the sum of the gradients that its parameters must have seen."""

    def __init__(self, rank: int, hook: str = "powersgd(rank=1)", view: bool = False, **given: Any) -> None:
        self.model = DistributedDataParallel(Linear(), bucket_cap_mb=0.001, gradient_as_bucket_view=view)
        self.optimizer = self.sgd()
        if given.pop("optimizer", True):
            given["optimizer"] = self.optimizer
        self.handle = commhooks.attach(self.model, hook, timeout=20.0, **given)
        self.generator = torch.Generator().manual_seed(rank)
        self.true = {name: torch.zeros_like(p) for name, p in self.model.module.named_parameters()}

    def sgd(self, **options: Any) -> torch.optim.SGD:
        return torch.optim.SGD(self.model.parameters(), lr=1.0, **options)

    def backward(self, *, counts: bool = True, zero: bool = False, context: Any = None, scaler: Any = None) -> None:
        wanted = {name: torch.randn(p.shape, generator=self.generator) * (not zero) for name, p in self.true.items()}
        if counts:
            for name, gradient in wanted.items():
                self.true[name] += gradient
        inside: AbstractContextManager[Any] = context if context is not None else nullcontext()
        with inside:
            loss = self.model(wanted)
            (loss if scaler is None else scaler.scale(loss)).backward()

    def lost(self) -> float:
        """Return the part that is neither applied nor owed."""
        self.model.zero_grad()
        self.backward(zero=True)  # resolves the step before, and adds no new one
        gap = whole = 0.0
        for name, true in self.true.items():
            state: Any = self.handle.state
            residual = state.read(name, "residual")
            owed = torch.zeros_like(true) if residual is None else residual.view_as(true) / state.versions.loss_scale
            sums = torch.stack([true, owed])
            dist.all_reduce(sums)
            mean = sums / dist.get_world_size()
            applied = -self.model.module.get_parameter(name).detach()
            gap += float((applied + mean[1] - mean[0]).square().sum())
            whole += float(mean[0].square().sum())
        self.handle.detach()
        return (gap / whole) ** 0.5


def accumulated(run: Run, set_to_none: bool) -> None:
    for step in range(6):
        run.optimizer.zero_grad(set_to_none)
        for micro in range(3):
            held_back = run.model.no_sync() if micro == 0 and step % 2 else None
            run.backward(context=held_back)
        run.optimizer.step()


def another(run: Run) -> None:
    optimizer = run.sgd()
    for _ in range(6):
        optimizer.zero_grad()
        run.backward()
        optimizer.step()


def by_hand(run: Run) -> None:
    for _ in range(6):
        run.model.zero_grad()
        run.backward()
        with torch.no_grad():
            for p in run.model.parameters():
                p -= p.grad  # type: ignore[operator]


def skipping(run: Run) -> None:
    for step in range(12):
        run.optimizer.zero_grad(set_to_none=step % 4 < 2)
        skip = step % 3 == 1
        run.backward(counts=not skip)
        run.backward(counts=not skip)
        if not skip:
            run.optimizer.step()


def scaled(run: Run, scaler: Any, fused: bool) -> None:
    optimizer = run.sgd(fused=True) if fused else run.optimizer
    for step in range(8):
        optimizer.zero_grad()
        for _ in range(1 + step % 2):
            run.backward(scaler=scaler)
        scaler.step(optimizer)
        scaler.update(None if step % 3 else 2.0 ** (step % 5))


def everything(rank: int, world: int) -> dict[str, float]:
    found = {}
    for view in (False, True):
        for set_to_none in (True, False):
            run = Run(rank, view=view)
            accumulated(run, set_to_none)
            found[f"accumulated, view={view}, set_to_none={set_to_none}"] = run.lost()
        for body in (another, by_hand, skipping):
            run = Run(rank, view=view)
            body(run)
            found[f"{body.__name__}, view={view}"] = run.lost()
    for given in (True, False):
        for fused in (True, False):
            scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
            run = Run(rank, scaler=scaler, optimizer=given)
            scaled(run, scaler, fused)
            found[f"scaled, optimizer={given}, fused={fused}"] = run.lost()
    return found


@pytest.mark.full
def test_applied_and_owed_are_the_sum_of_all_gradients_that_were_used() -> None:
    for found in spawn(everything, 2):
        assert {what: lost for what, lost in found.items() if lost > 1e-5} == {}


def joined(rank: int, world: int, hook: str, watched: str) -> list[Any]:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0) if watched == "scaler" else None
    run = Run(rank, hook, optimizer=watched == "optimizer", **({"scaler": scaler} if scaler else {}))
    seen: list[Any] = []
    for epoch in range(3):
        with Join([run.model]):
            for step in range(3 + 2 * ((rank + epoch) % 2)):
                run.optimizer.zero_grad()
                run.backward(scaler=scaler)
                if step != 4:  # the loop skips the last step, while the other rank has joined
                    run.optimizer.step()
        seen.append(run.handle.state_dict()["step"])
        run.optimizer.zero_grad()
    run.model.zero_grad()
    run.backward()  # resolves the last step of the last epoch
    state: Any = run.handle.state
    return [seen, state.step, state.read("a", "q").tolist(), run.model.module.a.grad.tolist()]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("hook", "watched"),
    [
        ("powersgd(rank=1)", "optimizer"),
        pytest.param("powersgd(rank=1, start_iter=8)", "optimizer", marks=pytest.mark.full),
        pytest.param("powersgd(rank=1)", "scaler", marks=pytest.mark.full),
        pytest.param("powersgd(rank=1, start_iter=8)", "scaler", marks=pytest.mark.full),
    ],
)
def test_ranks_of_uneven_inputs_stay_at_one_step(hook: str, watched: str) -> None:
    (ours, step, q, gradient), (theirs, their_step, their_q, their_gradient) = spawn(joined, 2, hook, watched)
    assert (step, q, gradient) == (their_step, their_q, their_gradient)
    assert step == 12
    assert max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) <= 1, (
        "a joined rank presumes that the step is used"
    )
