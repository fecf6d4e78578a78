"""Train several models, one hook each, in turns: the loop of the demo and the benchmark.

Turns make times comparable: a program that slows the machine for a second slows all models equally. Each step starts
behind a barrier, so that its time does not include the skew of the step before. The slowest rank's time counts.
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
    """One hook's model and its measurements, one entry per step."""

    expr: str
    model: DistributedDataParallel
    optimizer: torch.optim.Optimizer
    handle: Any = None  # a commhooks.CommHook; None for PyTorch's hooks
    seconds: list[float] = field(default_factory=list)  # of this rank; `slowest` combines the ranks
    losses: list[float] = field(default_factory=list)  # mean over the ranks' batches
    wire: list[float] = field(default_factory=list)  # bytes that this rank has sent so far
    val: list[tuple[int, float]] = field(default_factory=list)  # (steps done, held-out loss)


def wrap(net: torch.nn.Module, device: torch.device, bucket_cap_mb: float | None) -> DistributedDataParallel:
    """Wrap ``net`` in DDP on this rank's device."""
    ids = [device.index] if device.type == "cuda" else None
    return DistributedDataParallel(
        net.to(device), device_ids=ids, bucket_cap_mb=bucket_cap_mb, gradient_as_bucket_view=True
    )


def attach(run: Run) -> Run:
    """Attach the hook of the run's expression to its model."""
    run.handle = commhooks.attach(run.model, run.expr)
    return run


def timed_step(run: Run, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Run one training step, record this rank's seconds and return the detached loss (0-d)."""
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
    """Wait until every rank has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    dist.barrier(device_ids=[device.index] if device.type == "cuda" else None)


def slowest(runs: list[Run], device: torch.device) -> list[list[float]]:
    """Return the seconds of the slowest rank for each run and step."""
    flat = torch.tensor([s for run in runs for s in run.seconds], dtype=torch.float64, device=device)
    dist.all_reduce(flat, op=dist.ReduceOp.MAX)
    return [part.tolist() for part in flat.split([len(run.seconds) for run in runs])]


@torch.no_grad()
def evaluate(run: Run, x: torch.Tensor, y: torch.Tensor, rank: int, world: int, batch: int) -> float:
    """Return the mean held-out loss; ``x`` and ``y`` are ``(windows, context)``, divided among the ranks."""
    total = torch.zeros((), dtype=torch.float32, device=x.device)
    mine_x, mine_y = x[rank::world].split(batch), y[rank::world].split(batch)
    for part_x, part_y in zip(mine_x, mine_y, strict=True):
        total += run.model.module(part_x, part_y) * len(part_x)
    dist.all_reduce(total)
    return total.item() / len(x)
