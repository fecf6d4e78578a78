"""Several models, one hook each, trained side by side: the loop that the demo and the benchmark share.

Taking turns step by step is what makes their times comparable: a neighbour that slows the machine down for a second
slows all of them alike. Each step starts behind a barrier, so a step's time is its own and not the skew that the step
before it left behind, and the time that counts is that of the slowest rank.
"""

import time
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import commhooks


@dataclass
class Run:
    """One hook's model and what was recorded of it, one entry per step."""

    expr: str
    model: DistributedDataParallel
    optimizer: torch.optim.Optimizer
    handle: Any = None  # a commhooks.CommHook; None for a hook that is not ours
    seconds: list[float] = field(default_factory=list)  # this rank's; `slowest` gives all ranks' together
    losses: list[float] = field(default_factory=list)  # mean over the ranks' batches
    wire: list[float] = field(default_factory=list)  # bytes this rank has sent so far
    val: list[tuple[int, float]] = field(default_factory=list)  # (steps done, held-out loss)


def wrap(net: torch.nn.Module, device: torch.device, bucket_cap_mb: float | None) -> DistributedDataParallel:
    """Make ``net`` a data-parallel model on this rank's device."""
    ids = [device.index] if device.type == "cuda" else None
    return DistributedDataParallel(
        net.to(device), device_ids=ids, bucket_cap_mb=bucket_cap_mb, gradient_as_bucket_view=True
    )


def attach(run: Run) -> Run:
    """Give the run's model the hook that its expression names."""
    run.handle = commhooks.attach(run.model, run.expr)
    return run


def timed_step(run: Run, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """One training step; records this rank's seconds and gives the detached loss (0-d)."""
    device = x.device
    _settle(device)
    start = time.perf_counter()
    run.optimizer.zero_grad()
    loss: torch.Tensor = run.model(x, y)
    loss.backward()
    run.optimizer.step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    run.seconds.append(time.perf_counter() - start)
    return loss.detach()


def _settle(device: torch.device) -> None:
    """Let every rank reach this point with nothing left to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    dist.barrier(device_ids=[device.index] if device.type == "cuda" else None)


def slowest(runs: list[Run], device: torch.device) -> list[list[float]]:
    """Per run and step, the seconds of the slowest rank."""
    flat = torch.tensor([s for run in runs for s in run.seconds], dtype=torch.float64, device=device)
    dist.all_reduce(flat, op=dist.ReduceOp.MAX)
    return [part.tolist() for part in flat.split([len(run.seconds) for run in runs])]


@torch.no_grad()
def evaluate(run: Run, x: torch.Tensor, y: torch.Tensor, rank: int, world: int, batch: int) -> float:
    """Mean held-out loss; ``x`` and ``y`` are ``(windows, context)``, the ranks share the windows out evenly."""
    total = torch.zeros((), device=x.device)
    mine_x, mine_y = x[rank::world].split(batch), y[rank::world].split(batch)
    for part_x, part_y in zip(mine_x, mine_y, strict=True):
        total += run.model.module(part_x, part_y) * len(part_x)
    dist.all_reduce(total)
    return total.item() / len(x)
