"""The cells of the quality study: what is trained, and one run of it on simulated workers."""

import math
import time
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch

from ch_bench import gpt, text
from ch_bench.outer.method import ALL_FOUR, ALL_THREE, ALL_TWO, FOUR_BITS, SPARSE, Method
from commhooks.simulate import SimulatedRank, simulate


@dataclass(frozen=True)
class Size:
    """A model and how long it is trained."""

    steps: int
    width: int = 128
    layers: int = 4
    context: int = 64
    batch: int = 8  # per worker
    workers: int = 4
    lr: float = 2e-3


SIZES = {
    "pilot": Size(steps=600, width=32, layers=2, context=32),
    "long": Size(steps=9000, width=32, layers=2, context=32, batch=16, lr=8e-3),  # flat at the end, in minutes
    "small": Size(steps=3000, width=64, layers=2),
    "full": Size(steps=3000),
}


STEPS_OUT = ((1.0, 0.5), (0.7, 0.9), (1.0, 0.0), (0.9, 0.7))


def methods() -> list[Method]:
    """All of the study, so ordered that one which was stopped has answered the larger questions."""
    found = [Method()]
    # A hundred times fewer bytes than bf16 at every step, by more rounds of fewer bits or fewer rounds of more.
    found += [Method(15, ALL_TWO), Method(21, ALL_THREE), Method(28, ALL_FOUR), Method(32, FOUR_BITS)]
    found += [Method(15, ALL_TWO, 1.0, 0.5, 4, 3, "carry"), Method(28, ALL_FOUR, 1.0, 0.5, 4, 5, "carry")]
    found += [Method(every, ALL_TWO, 1.0, 0.5, 4, 5, "carry") for every in (150, 141)]  # a thousand times
    found += [Method(30, FOUR_BITS, *step) for step in STEPS_OUT]
    found += [Method(30, FOUR_BITS, 1.0, 0.5, 4, 5, mix) for mix in ("carry", 0.5)]
    found += [Method(every, exchange) for every in (30, 10, 100) for exchange in ("bf16_compress", FOUR_BITS)]
    found += [Method(every, SPARSE, 1.0, 0.0) for every in (30, 10, 100)]
    found += [Method(15, ALL_TWO, *step) for step in ((1.0, 0.3), (0.8, 0.7))]
    found += [Method(32, FOUR_BITS, 0.9, 0.7), Method(30, FOUR_BITS, 1.0, 0.5, 1, 5, "carry")]
    found += [Method(15, "bf16_compress"), Method(28, ALL_FOUR, 1.0, 0.5, 4), Method(30, SPARSE, 1.0, 0.0, 2, 5, 0.5)]
    return list(dict.fromkeys(found))


@dataclass(frozen=True)
class Cell:
    """One run: a method, a size, a seed."""

    size_name: str
    size: Size
    method: Method
    seed: int

    @property
    def key(self) -> str:
        """By which it is kept; all that decides about the result is in it."""
        return f"{self.size_name} {self.size.steps} steps, {self.method.label}, seed {self.seed}"

    def run(self) -> dict[str, Any]:
        """Train, and return the record."""
        torch.set_num_threads(1)
        begun = time.perf_counter()
        data = text.load()
        body = partial(_outer, self, data) if self.method.every else partial(_every_step, self, data)
        workers = self.size.workers if self.method.every else 1
        rows, sent = simulate(workers, body)[0]
        return {
            "method": self.method.as_dict(),
            "label": self.method.label,
            "size": asdict(self.size),
            "seed": self.seed,
            "held_out": rows,
            "wire_bytes": sent,
            "seconds": round(time.perf_counter() - begun, 1),
        }


def cells(size_name: str, seeds: int, steps: int | None) -> list[Cell]:
    """Every method, seed by seed."""
    size = SIZES[size_name] if steps is None else replace(SIZES[size_name], steps=steps)
    return [Cell(size_name, size, method, seed) for seed in range(seeds) for method in methods()]


def parameters(size: Size) -> int:
    """Of the model."""
    return gpt.count_parameters(_net(size, text.load().vocab))


def _net(size: Size, vocab: int) -> gpt.GPT:
    return gpt.GPT(vocab, size.context, size.width, size.layers, heads=max(1, size.width // 32))


def _start(cell: Cell, vocab: int) -> tuple[gpt.GPT, torch.optim.Optimizer]:
    # The seed of the weights is set on the thread of a rank: simulated ranks take turns, so nothing comes in between.
    torch.manual_seed(cell.seed)
    net = _net(cell.size, vocab)
    return net, torch.optim.AdamW(net.parameters(), lr=cell.size.lr, betas=(0.9, 0.95), weight_decay=0.01)


def _schedule(size: Size, step: int) -> float:
    """Warm-up over a tenth of the steps, then half a cosine down to a tenth, as the demo."""
    warm = min(1.0, (step + 1) / max(1, size.steps // 10))
    return size.lr * warm * (0.55 + 0.45 * math.cos(math.pi * step / size.steps))


def _marks(size: Size) -> set[int]:
    return {size.steps * part // 5 for part in range(1, 6)}


@torch.no_grad()
def _held_out(net: gpt.GPT, data: text.Text, size: Size) -> float:
    # All of it: two models that are equally good differ by 0.4 % on 256 windows.
    x, y = text.validation(data.val, size.context, windows=len(data.val) // size.context)
    parts = zip(x.split(64), y.split(64), strict=True)
    return float(sum(net(px, py).item() * len(px) for px, py in parts) / len(x))


def _outer(cell: Cell, data: text.Text, rank: SimulatedRank) -> tuple[list[tuple[int, float]], float]:
    size, method = cell.size, cell.method
    net, inner = _start(cell, data.vocab)
    # The time-out is of four workers that take turns, each step of one.
    optimizer = method.outer(inner, net, transport=rank.transport, timeout=3600.0)
    batches = text.Batches(data.train, size.batch, size.context, rank.rank, cell.seed)
    rows = []
    for step in range(size.steps):
        for group in optimizer.param_groups:
            group["lr"] = method.inner * _schedule(size, step)
        x, y = batches[step]
        optimizer.zero_grad()
        net(x, y).backward()
        optimizer.step()
        if step + 1 == size.steps:
            optimizer.finish()
        if step + 1 in _marks(size) and rank.rank == 0:
            with optimizer.global_parameters():
                rows.append((step + 1, round(_held_out(net, data, size), 5)))
    return rows, optimizer.stats()["wire_bytes"]


def _every_step(cell: Cell, data: text.Text, rank: SimulatedRank) -> tuple[list[tuple[int, float]], float]:
    """Data parallelism with the exact mean: one model is enough for all workers, which have the same weights."""
    size = cell.size
    net, inner = _start(cell, data.vocab)
    every = [text.Batches(data.train, size.batch, size.context, worker, cell.seed) for worker in range(size.workers)]
    rows = []
    for step in range(size.steps):
        for group in inner.param_groups:
            group["lr"] = _schedule(size, step)
        inner.zero_grad()
        for batches in every:
            x, y = batches[step]
            (net(x, y) / size.workers).backward()
        inner.step()
        if step + 1 in _marks(size):
            rows.append((step + 1, round(_held_out(net, data, size), 5)))
    share = 2 * (size.workers - 1) / size.workers
    return rows, share * 4.0 * gpt.count_parameters(net) * size.steps
