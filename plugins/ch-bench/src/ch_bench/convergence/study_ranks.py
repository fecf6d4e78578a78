"""One model, several simulated ranks: their gradients one after another, then the real hook over all of them.

All ranks of data parallelism have the same weights, so one model is enough: the loss of each rank's batch is
differentiated in turn, and the gradients go through one engine per rank, in several buckets, as they would in DDP.
That the ranks then hold the same bits is checked at every step; a hook of which that is not true cannot be run so.
"""

import time
from typing import Any

import torch

import commhooks
from ch_bench.convergence.study_tasks import TASKS, Setting, Task, measured_at
from commhooks.testing import SimulatedRanks

NAMES = ("step", "train", "test", "wire", "residual")


def train(setting: Setting, expr: str, kind: str, seed: int) -> dict[str, Any]:
    """Train with a hook, and return the record of the run.

    Returns:
        ``step``, ``train``, ``test``, ``wire``, ``residual``: lists with one entry per measurement. ``wire`` is the
        bytes that one rank has sent by then (:meth:`~commhooks.CommHook.stats`), ``residual`` the norm of what is kept
        back, averaged over the ranks. ``payload``, ``compressed_steps``, ``seconds``: of the whole run.
    """
    begun = time.perf_counter()
    task: Task = TASKS[setting.task](setting, seed, kind)
    params = dict(task.model.named_parameters())
    ranks = SimulatedRanks(lambda: commhooks.create(expr), setting.ranks, params, buckets=setting.buckets)
    optimizer = task.optimizer()
    rows: list[tuple[float, ...]] = []
    wanted = list(measured_at(setting.steps))
    for step in range(setting.steps + 1):
        if step in wanted:
            ranks.settle()
            rows.append((step, *task.measure(), ranks.handles[0].stats()["wire_bytes"], _residual(ranks)))
        if step < setting.steps:
            _step(task, params, ranks, step)
            for group in optimizer.param_groups:
                group["lr"] = task.rate(step)
            optimizer.step()
    figures = ranks.handles[0].stats()
    return {
        **curves_of(rows),
        "payload": figures["payload_bytes"],
        "compressed_steps": figures["compressed_steps"],
        "seconds": time.perf_counter() - begun,
    }


def _step(task: Task, params: dict[str, torch.nn.Parameter], ranks: SimulatedRanks, step: int) -> None:
    """Leave the reduced gradient of one step in the parameters."""
    every = []
    for rank in range(ranks.world_size):
        found = torch.autograd.grad(task.loss(task.model, rank, step), list(params.values()))
        every.append(dict(zip(params, found, strict=True)))
    result = ranks.step(every)
    for error in result.errors:
        if error is not None:
            raise error
    first, *others = result.gradients
    for name, parameter in params.items():
        if not all(torch.equal(first[name], other[name]) for other in others):
            raise RuntimeError(f"{ranks.handles[0].expr}: the ranks have different gradients of {name}")
        parameter.grad = first[name]


def curves_of(rows: list[tuple[float, ...]]) -> dict[str, list[float]]:
    """Measurements as one list for each of `NAMES`, with six digits."""
    columns = zip(NAMES, zip(*rows, strict=True), strict=True)
    return {name: [float(f"{v:.6g}") for v in values] for name, values in columns}


def _residual(ranks: SimulatedRanks) -> float:
    """Mean over the ranks of the norm of all residuals."""
    norms = []
    for engine in ranks.engines:
        squares = (t.double().square().sum().item() for _, field, t in engine.state.entries() if field == "residual")
        norms.append(sum(squares) ** 0.5)
    return sum(norms) / len(norms)
