"""The part of a ``DistributedDataParallel`` case that every rank runs. It trains one model with a
hook and one without.
"""

import copy
import io
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from commhooks import CommHook
from tests.campaign import models
from tests.campaign.ambient import ambient
from tests.campaign.checks import (
    Bounds,
    Oracle,
    Sums,
    TorchRefuses,
    Wrong,
    flat64,
    mean_owed,
    oracle,
    same_bits,
    same_on_all_ranks,
)
from tests.campaign.doors import Attached, open_door
from tests.campaign.draw import Case, weight
from tests.campaign.hooks import entry_of
from tests.campaign.notes import Notes


class Loop:
    """One model under one kind of data parallelism, with a user's training loop."""

    def __init__(self, case: Case, hooked: bool) -> None:
        self.case, self.hooked = case, hooked
        self.door: Attached | None = None
        self.build(models.build(case.model, case.dtype))

    def build(self, net: nn.Module) -> None:
        """Wrap the model, create an optimizer and attach the hook."""
        case = self.case
        self.net = net
        make = torch.optim.Adam if case.optimizer == "adam" and case.model != "sparse" else torch.optim.SGD
        lr = 0.002 if case.optimizer == "adam" else 0.05
        self.optimizer: Any = make([p for p in net.parameters() if p.requires_grad], lr=lr)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2) if case.scaled else None
        options = {
            "bucket_cap_mb": case.cap,
            "find_unused_parameters": case.find_unused,
            "gradient_as_bucket_view": case.views,
            "static_graph": case.static,
        }
        if self.scaler is not None:
            self.scaler.scale(torch.zeros(()))  # the scaler creates its tensors in its first call
        self.ddp = DistributedDataParallel(net, **options)
        if self.hooked:
            self.door = open_door(case, self.ddp, self.optimizer, self.scaler)

    @property
    def scale(self) -> float:
        return self.scaler.get_scale() if self.scaler is not None else 1.0

    def names(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.net.named_parameters() if p.requires_grad}

    def gradients(self, step: int, scale: float) -> dict[str, torch.Tensor | None]:
        """Return the gradients of one optimizer step with all of its backwards."""
        self.optimizer.zero_grad(set_to_none=self.case.to_none)
        handle = self.door.handle if self.door is not None and self.case.weighted else None
        for micro, loss_of in enumerate(losses(self.case, step)):
            if handle is not None and handle.attached:
                weigh(handle, self.case, step, micro)
            quiet = self.case.accumulate == "no_sync" and micro == 0
            with self.ddp.no_sync() if quiet else nullcontext(), cast(self.case), ambient(self.case.ambient):
                loss = loss_of(self.ddp)
            with self.ddp.no_sync() if quiet else nullcontext(), ambient(self.case.ambient):
                (loss * scale).backward()
        return {name: None if p.grad is None else p.grad.detach().clone() for name, p in self.names().items()}

    def apply(self, finite: bool) -> None:
        """Clip, then step, as a training loop does. Skip a step that is not finite."""
        if self.scaler is not None and self.case.clip:
            self.scaler.unscale_(self.optimizer)
        if self.case.clip:
            torch.nn.utils.clip_grad_norm_(self.net.parameters(), 0.1)
        if self.scaler is not None:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        elif finite:
            self.optimizer.step()

    def resume(self) -> None:
        """Save to files and load into a new model, wrapped with other buckets."""
        file = io.BytesIO()
        saved = {"net": self.net.state_dict(), "opt": self.optimizer.state_dict()}
        saved["scaler"] = self.scaler.state_dict() if self.scaler is not None else {}
        saved["hook"] = self.door.save() if self.door is not None else {}
        torch.save(saved, file)
        file.seek(0)
        saved = torch.load(file, weights_only=True)
        net = models.build(self.case.model, self.case.dtype)
        net.load_state_dict(saved["net"])
        self.build(net)
        self.optimizer.load_state_dict(saved["opt"])
        if self.scaler is not None:
            self.scaler.load_state_dict(saved["scaler"])
        if self.door is not None:
            self.door.load(saved["hook"])


def weights(case: Case, step: int) -> list[float]:
    """Return the tokens of each of this rank's micro-batches; 1 each without weights."""
    micros = range(1 if case.accumulate == "no" else 2)
    return [weight(case, step, dist.get_rank(), micro) if case.weighted else 1.0 for micro in micros]


def weigh(handle: CommHook, case: Case, step: int, micro: int) -> None:
    """Weigh the backward of a micro-batch."""
    n = weights(case, step)[micro]
    handle.weigh(torch.tensor(n) if case.seed % 2 else n, of="sum" if case.weighted == "sum" else "mean")


def share(case: Case, step: int, micro: int) -> float:
    """Return the factor of the loss of a micro-batch, as the documentation says."""
    mine = weights(case, step)
    if not case.weighted or not sum(mine):
        return 1.0
    return mine[micro] if case.weighted == "sum" else mine[micro] / sum(mine)


def losses(case: Case, step: int) -> Iterator[Any]:
    """Return, for each micro-batch, a function from a model to its loss."""
    rank = dist.get_rank()
    for micro in range(1 if case.accumulate == "no" else 2):
        x = models.batch(case.seed, step, rank, micro, models.input_dtype(case.dtype))
        bad = step == case.poisoned and rank == case.seed % case.world
        who = rank // max(1, case.shards)  # ranks that share one copy under FSDP use the same branch
        use = (case.seed + step * 3 + who) // 2 if not case.static else 1
        factor = (torch.inf if bad else 1.0) * share(case, step, micro)

        def loss_of(model: Any, x: torch.Tensor = x, factor: float = factor, use: int = use) -> torch.Tensor:
            return model(x, use) * factor

        yield loss_of


def cast(case: Case) -> Any:
    return torch.autocast("cpu", torch.bfloat16) if case.dtype == "autocast" else nullcontext()


def own_gradients(bare: nn.Module, case: Case, step: int, scale: float) -> list[dict[str, torch.Tensor]]:
    """Return this rank's gradients without any data parallelism, one dict per micro-batch, flat and in fp64."""
    found = []
    for loss_of in losses(case, step):
        bare.zero_grad()
        with cast(case):
            loss = loss_of(bare)
        (loss * scale).backward()
        params = {name: p for name, p in bare.named_parameters() if p.requires_grad}
        found.append({n: flat64(p.grad if p.grad is not None else torch.zeros_like(p)) for n, p in params.items()})
    return found


def follow(model: nn.Module, leader: nn.Module) -> None:
    """Copy the leader's parameters and buffers to a model."""
    with torch.no_grad():
        for mine, theirs in zip(
            [*model.parameters(), *model.buffers()], [*leader.parameters(), *leader.buffers()], strict=True
        ):
            mine.copy_(theirs)


def trial(case: Case) -> None:
    """The same loop without a hook.

    Raises:
        TorchRefuses: torch does not run it; nothing is learnt about a hook.
    """
    try:
        plain = Loop(case, hooked=False)
        for step in range(2):
            plain.gradients(step, plain.scale)
            plain.apply(True)
    except Exception as error:
        raise TorchRefuses(f"{type(error).__name__}: {error}") from error


def run(rank: int, world: int, case: Case, notes: Notes) -> dict[str, float]:
    """Run one case. Raise the first check that fails."""
    notes.phase("the same loop without a hook")
    trial(case)
    notes.phase("attach")
    loop, plain = Loop(case, hooked=True), Loop(case, hooked=False)
    bare = copy.deepcopy(plain.net)
    bounds = bounds_of(case)
    sums = Sums()
    for step in range(case.steps):
        if step == case.resumed:
            notes.phase(f"resume before step {step}")
            loop.resume()
            plain.build(plain.net)
        follow(plain.net, loop.net)
        follow(bare, loop.net)
        scale = loop.scale
        truth = oracle(own_gradients(bare, case, step, scale), weight=sum(weights(case, step)), of=case.weighted)
        notes.phase(f"step {step}, plain DDP beside it")
        beside = plain.gradients(step, scale)
        notes.phase(f"step {step}")
        grads = loop.gradients(step, scale)
        judge(case, bounds, grads, beside, truth, loop)
        if truth.finite:
            sums.add(grads, truth, scale)
        notes.phase(f"optimizer of step {step}")
        loop.apply(truth.finite)
    notes.phase("the end")
    return finish(case, loop, bounds, sums, bare)


def bounds_of(case: Case) -> Bounds:
    return Bounds(case.entry, case.world, 2 if case.accumulate == "twice" else 1)


def judge(
    case: Case,
    bounds: Bounds,
    grads: dict[str, torch.Tensor | None],
    beside: dict[str, torch.Tensor | None],
    truth: Oracle,
    loop: Loop,
) -> None:
    """Check one step."""
    entry = bounds.entry
    if not truth.finite:
        hidden = all(g is None or bool(flat64(g).isfinite().all()) for g in grads.values())
        if hidden and entry.promise != "silent":
            raise Wrong("Inf reaches the optimizer", "one rank's gradient is infinite, the reduced ones are all finite")
        return
    if entry.promise != "silent":
        same_on_all_ranks(grads)
    for name, param in loop.names().items():
        bounds.near(name, grads[name], truth, param.dtype)
    if entry.bits and bits_promised(case) and not case.weighted:
        same_bits(grads, beside)


def bits_promised(case: Case) -> bool:
    """DDP divides by W if the gradient is in the bucket, instead of multiplying by 1/W (docs/packages/ddp.md)."""
    in_place = case.views and (not case.to_none or case.accumulate != "no")
    return case.world in {1, 2, 4} or not in_place


def finish(case: Case, loop: Loop, bounds: Bounds, sums: Sums, bare: nn.Module) -> dict[str, float]:
    """Check the residual, the ranks' parameters, and the model without its hook after the last step."""
    if loop.door is None:
        raise AssertionError("the loop has no hook")
    params = loop.names()
    if sums.steps:
        owed = mean_owed(loop.door.residuals(params), params)
        for name, param in params.items():
            bounds.conserved(name, sums, owed[name], param.dtype)
    if bounds.entry.promise != "silent":
        same_on_all_ranks(dict(loop.net.named_parameters()), "parameters")
    found = loop.door.close()
    if loop.door.handle is not None and loop.scaler is None:
        follow(bare, loop.net)
        step = case.steps
        truth = oracle(own_gradients(bare, case, step, 1.0))
        plain = Bounds(entry_of("allreduce"), case.world, bounds.backwards, bounds.loose)
        grads = loop.gradients(step, 1.0)
        for name, param in params.items() if truth.finite else ():
            plain.near(name, grads[name], truth, param.dtype)
    return found
