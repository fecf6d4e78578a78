"""The part of an outer-optimizer case that every rank runs. It compares ``OuterOptimizer`` with a manual loop in plain
PyTorch.

The manual loop averages ``start - parameter`` over all ranks every ``every`` steps and steps SGD on the starts. Ranks
that add parameters, or whose buffers change shape, must all refuse with a typed error.
"""

import copy
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from commhooks import CommHooksError
from tests.campaign import models
from tests.campaign.checks import Wrong, flat64, same_on_all_ranks
from tests.campaign.draw import Case
from tests.campaign.notes import Notes

LR, OUTER_LR, MOMENTUM = 0.05, 0.9, 0.3


class Cached(nn.Module):
    """A model with float buffers: one constant, one that grows with the batch."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.register_buffer("constant", torch.full((5,), 0.1, dtype=torch.float32, device="cpu"))
        self.register_buffer("grown", torch.zeros(3, dtype=torch.float32, device="cpu"))

    def forward(self, x: torch.Tensor, use: int = 0) -> Any:
        return self.net(x, use)


def outer_sgd(starts: Sequence[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(list(starts), lr=OUTER_LR, momentum=MOMENTUM, nesterov=True)


def run(rank: int, world: int, case: Case, notes: Notes) -> dict[str, float]:
    """One case; raise the first check that fails."""
    from ch_outer import FixedRanks, OuterOptimizer, Schedule

    notes.phase("construct")
    model = Cached(models.build(case.model, case.dtype))
    by_hand = copy.deepcopy(model)
    inner = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=LR)
    optimizer = OuterOptimizer(
        inner, model, Schedule(case.every), exchange=case.expr, outer=outer_sgd, ranks=FixedRanks(timeout=20.0)
    )
    hand = _ByHand(by_hand, case.every)
    refused, every = "", [""] * world
    for step in range(case.steps):
        notes.phase(f"step {step}")
        if step == case.added:
            for each, opt in ((model, optimizer), (by_hand, None)):
                torch.manual_seed(7)
                head = nn.Linear(models.WIDTH, 4)
                each.net.head_added = head
                if opt is not None:
                    opt.add_param_group({"params": list(head.parameters())})
        if step == case.grown and rank == world - 1:
            model.grown = torch.zeros(9, dtype=torch.float32, device="cpu")
        for each in (model, by_hand):
            each.zero_grad()
            x = models.batch(case.seed, step, rank, 0, models.input_dtype(case.dtype))
            loss = each(x, case.seed + step)
            if case.added >= 0 and step >= case.added:
                loss = loss + each.net.head_added(x.float()).square().mean()
            loss.backward()
        try:
            optimizer.step()
        except CommHooksError as error:
            refused = type(error).__name__
        dist.all_gather_object(every, refused)
        if len(set(every)) > 1:
            raise Wrong("all ranks raise, or none", f"ranks say {every}")
        if refused:
            if case.grown < 0 and case.added < 0:
                raise Wrong("no refusal without a cause", refused)
            return {"compressed_steps": 0.0}
        hand.step()
    notes.phase("finish")
    try:
        optimizer.finish()
    except CommHooksError as error:
        refused = type(error).__name__
    dist.all_gather_object(every, refused)
    if len(set(every)) > 1 or bool(refused) != (case.grown >= 0 or case.added >= 0):
        raise Wrong("all ranks refuse a changed model", f"ranks say {every}")
    if refused:
        return {"compressed_steps": 0.0}
    hand.finish()
    same_on_all_ranks({n: p.detach() for n, p in model.named_parameters()}, "parameters")
    same_on_all_ranks({n: b.detach() for n, b in model.named_buffers() if b.is_floating_point()}, "buffers")
    if not torch.equal(model.constant, by_hand.constant):
        raise Wrong("an average of equal buffers is equal", f"{model.constant.tolist()}")
    if case.entry.promise == "exact":
        for name, param in model.named_parameters():
            a, b = flat64(param), flat64(dict(by_hand.named_parameters())[name])
            allowed = 1e-4 * float(b.abs().max()) + 1e-6 if b.numel() else 0.0
            if b.numel() and not float((a - b).abs().max()) <= allowed:
                raise Wrong(
                    "as the loop by hand", f"{name}: {float((a - b).abs().max()):.3g} off, allowed {allowed:.3g}"
                )
    return {"compressed_steps": 0.0}


class _ByHand:
    """DiLoCo's loop in plain PyTorch (Douillard et al. 2023, arXiv:2311.08105, algorithm 1)."""

    def __init__(self, model: nn.Module, every: int) -> None:
        self.model, self.every, self.count = model, every, 0
        self.starts: dict[str, torch.Tensor] = {}
        self.momenta: dict[str, torch.Tensor] = {}

    def step(self) -> None:
        with torch.no_grad():
            for name, p in self._trained():
                self.starts.setdefault(name, p.detach().clone())
                if p.grad is not None:
                    p.sub_(p.grad, alpha=LR)
        self.count += 1
        if self.count % self.every == 0:
            self._outer_step()

    def finish(self) -> None:
        if self.count % self.every:  # otherwise the last step has ended a round, and nothing has moved since
            self._outer_step()

    @torch.no_grad()
    def _outer_step(self) -> None:
        for name, p in self._trained():
            start = self.starts[name]
            moved = (start - p).float()
            dist.all_reduce(moved)
            moved = (moved / dist.get_world_size()).to(p.dtype)
            fresh = name not in self.momenta
            momentum = self.momenta.setdefault(name, moved.clone())
            if not fresh:
                momentum.mul_(MOMENTUM).add_(moved)
            start.sub_(moved + MOMENTUM * momentum, alpha=OUTER_LR)
            p.copy_(start)

    def _trained(self) -> list[tuple[str, nn.Parameter]]:
        return [(n, p) for n, p in self.model.named_parameters() if p.requires_grad]
