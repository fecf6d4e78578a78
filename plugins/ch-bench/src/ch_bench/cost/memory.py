"""What each hook holds beside the model, in bytes per parameter: at rest between steps, and at the peak inside one.

    OMP_NUM_THREADS=1 python -m ch_bench.cost.memory --out docs/measured/memory.md

Two gloo processes train twelve bias-free 2048 x 2048 layers (50.3 M parameters, fp32). Each hook runs in fresh
processes. What is read is the process's resident memory (``VmRSS``, and ``VmHWM`` after a reset of the peak), so that
what the allocator keeps counts as well; from it the figure of plain DDP with the same buckets is subtracted. What a hook
should hold is counted by hand beside it. Whether it grows is read after 100 and after 1 000 steps of a model of 0.2 M
parameters, again over plain DDP. Linux only.
"""

import argparse
import gc
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commhooks
from ch_bench.bench_report import command, heading
from ch_bench.gpu_kit.models import register_torch
from commhooks.testing import spawn


class Row(NamedTuple):
    """A hook, and what it should hold on two ranks: bytes per parameter, and of what."""

    hook: str
    counted: float = 0.0
    of: str = ""
    rollback: bool = True

    @property
    def label(self) -> str:
        return self.hook if self.theirs else f"`{self.hook}`" + ("" if self.rollback else ", `rollback=False`")

    @property
    def theirs(self) -> bool:
        """Whether it is PyTorch's hook of that name."""
        return self.hook.startswith(THEIRS)


THEIRS = "PyTorch's "
ROWS = [
    Row("allreduce"),
    Row("bf16_compress", 2, "the message"),
    Row("bf16_compress(accumulate='fp32')", 5, "sent, received, a half of the sums"),
    Row(f"{THEIRS}powersgd(rank=4)", 4, "one residual"),
    Row("powersgd(rank=4)", 8, "two residuals"),
    Row("powersgd(rank=4)", 4, "one residual", rollback=False),
    Row("powersgd(rank=4, error_feedback=False)"),
    Row("bf16_wrapper(powersgd(rank=4))", 8, "two residuals"),
    Row("batched_powersgd(rank=4)", 12, "two residuals, the matrix"),
    Row("batched_powersgd(rank=4)", 8, "one residual, the matrix", rollback=False),
    Row("error_feedback(bf16_compress)", 10, "two residuals, the message"),
    Row("error_feedback(bf16_compress)", 6, "one residual, the message", rollback=False),
    Row("quant8", 2.5, "sent, received, a half of the means, a byte each"),
    Row("quant4(error_feedback=True)", 9.3, "two residuals, messages"),
    Row("quant4(error_feedback=True)", 5.3, "one residual, messages", rollback=False),
    Row("quant4(error_feedback=True, residual='int8')", 3.3, "two residuals of a byte, messages"),
    Row("topk(density=0.01)", 12, "two residuals, the chunks"),
    Row("topk(density=0.01)", 8, "one residual, the chunks", rollback=False),
]
LAYERS, WIDTH = 12, 2048
SMALL = 128  # of the model that is trained for long
WHOLE, DEFAULT = 1000, 25  # MB: one bucket, and DDP's default


def resident(field: str) -> int:
    """``VmRSS`` or ``VmHWM`` of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


class Training:
    """A model with a hook on one rank, and steps of it."""

    def __init__(self, row: Row | None, cap: float, width: int) -> None:
        net = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(LAYERS)])
        self.numel = sum(p.numel() for p in net.parameters())
        self.model = DistributedDataParallel(net, bucket_cap_mb=cap)
        self.handle: Any = None
        if row is not None and row.theirs:
            register_torch(self.model, row.hook.removeprefix(THEIRS))
        elif row is not None:
            self.handle = commhooks.attach(self.model, row.hook, rollback=row.rollback)
        self._batch = torch.randn(4, width)

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.model.zero_grad(set_to_none=True)
            self.model(self._batch).pow(2).mean().backward()

    def resident(self) -> int:
        gc.collect()
        return resident("VmRSS")


def measure(rank: int, world: int, row: Row | None, cap: int) -> tuple[float, float]:
    """``(at rest, at the peak)`` of this process in bytes per parameter, model and gradients included."""
    training = Training(row, cap, WIDTH)
    training.steps(4)  # buckets are rebuilt, scratch and state are made
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    training.steps(2)
    peak = resident("VmHWM")
    if training.handle is not None:
        training.handle.assert_active()
    return training.resident() / training.numel, peak / training.numel


def grown(rank: int, world: int, row: Row | None, steps: tuple[int, int] = (100, 1000)) -> float:
    """MiB of resident memory that the steps between the two have added; three buckets."""
    training = Training(row, 4 * LAYERS * SMALL**2 / 3 / 2**20, SMALL)
    training.steps(steps[0])
    before = training.resident()
    training.steps(steps[1] - steps[0])
    return (training.resident() - before) / 2**20


def table(rows: list[Row]) -> str:
    """The figures of every hook over plain DDP's, as Markdown."""
    lines = [
        "| hook | at rest, one bucket | at the peak, one bucket | at rest, 25 MB buckets | at the peak, 25 MB buckets "
        "| counted | of what |",
        "|---|---|---|---|---|---|---|",
    ]
    plain = {cap: spawn(measure, 2, None, cap, timeout=900, group_timeout=600)[0] for cap in (WHOLE, DEFAULT)}
    for row in rows:
        cells = []
        for cap in (WHOLE, DEFAULT):
            if row.theirs and cap == DEFAULT:  # PowerSGD survives one bucket only
                cells += ["–", "–"]
                continue
            found = spawn(measure, 2, row, cap, timeout=900, group_timeout=600)[0]
            cells += [f"{have - without:.1f}" for have, without in zip(found, plain[cap], strict=True)]
        lines.append(f"| {row.label} | {' | '.join(cells)} | {row.counted:g} | {row.of or '–'} |")
        print(lines[-1], flush=True)
    return "\n".join(lines)


def growth(rows: list[Row]) -> str:
    """What 900 steps add to every hook, and to plain DDP, as Markdown."""
    lines = ["| hook | MiB more after 1 000 steps than after 100 |", "|---|---|"]
    for row in (None, *(row for row in rows if not row.theirs)):
        label = "plain DDP" if row is None else row.label
        lines.append(f"| {label} | {spawn(grown, 2, row, timeout=900, group_timeout=600)[0]:.1f} |")
        print(lines[-1], flush=True)
    return "\n".join(lines)


def main() -> None:
    """Measure, print, and write the record if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the table, with machine and versions, to this file")
    parser.add_argument("--only", default="", help="hooks with this in their expression")
    chosen = parser.parse_args()
    rows = [row for row in ROWS if chosen.only in row.hook]
    found = f"{table(rows)}\n\n## Over 1 000 steps\n\n{growth(rows)}"
    if chosen.out is not None:
        about = heading("Memory beside the model", command("ch_bench.cost.memory"), "2 gloo processes")
        chosen.out.write_text(
            f"{about}\nBytes per parameter over plain DDP with the same buckets, resident memory of a process, "
            f"{LAYERS} layers of {WIDTH} x {WIDTH} in fp32. Counted: the tensors that it keeps, on two ranks.\n\n{found}\n"
        )


if __name__ == "__main__":
    main()
