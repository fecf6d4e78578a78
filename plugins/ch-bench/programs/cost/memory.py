"""Bytes per parameter that each hook holds beyond the model, at rest between steps and at the peak inside one.

    OMP_NUM_THREADS=1 python -m programs.cost.memory --record

Two gloo processes train twelve bias-free 2048 x 2048 layers (50.3 M parameters, fp32), with new processes for each hook. The
program reads the resident memory (``VmRSS``, and ``VmHWM`` after a reset of the peak), which includes memory that the
allocator keeps. It subtracts the memory of plain DDP with the same buckets. The column "counted" is the expected size of the
hook's tensors. Growth is the difference between 100 and 1 000 steps of a model of 0.2 M parameters. Linux only.
"""

import argparse
import gc
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commhooks
from ch_bench.pytorch_hooks import attach_pytorch
from ch_bench.record import command, markdown_table, run_main, write
from ch_testing import spawn

THEIRS = "PyTorch's "
LAYERS, WIDTH = 12, 2048
SMALL = 128  # width of the model that trains for 1 000 steps
WHOLE, DEFAULT = 1000, 25  # MB: one bucket, and DDP's default


class HookMemory(NamedTuple):
    """A hook and the bytes per parameter that its tensors should take on two ranks."""

    hook: str
    counted: float = 0.0
    tensors: str = ""

    @property
    def label(self) -> str:
        return self.hook if self.theirs else f"`{self.hook}`"

    @property
    def theirs(self) -> bool:
        """True if it is PyTorch's hook."""
        return self.hook.startswith(THEIRS)


HOOKS = [
    HookMemory("allreduce"),
    HookMemory("bf16_compress", 2, "the message"),
    HookMemory("bf16_compress(accumulate='fp32')", 5, "sent, received, a half of the sums"),
    HookMemory(f"{THEIRS}powersgd(rank=4)", 4, "one residual"),
    HookMemory("powersgd(rank=4)", 8, "two residuals"),
    HookMemory("powersgd(rank=4, error_feedback=False)"),
    HookMemory("bf16_wrapper(powersgd(rank=4))", 8, "two residuals"),
    HookMemory("batched_powersgd(rank=4)", 12, "two residuals, the matrix"),
    HookMemory("error_feedback(bf16_compress)", 10, "two residuals, the message"),
    HookMemory("quant8", 2.5, "sent, received, a half of the means, a byte each"),
    HookMemory("quant4(error_feedback=True)", 9.3, "two residuals, messages"),
    HookMemory("quant4(error_feedback=True, residual='int8')", 3.3, "two residuals of a byte, messages"),
    HookMemory("topk(density=0.01)", 12, "two residuals, the chunks"),
]


def resident(field: str) -> int:
    """Return ``VmRSS`` or ``VmHWM`` of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


class Training:
    """A model with a hook on one rank."""

    def __init__(self, row: HookMemory | None, cap: float, width: int) -> None:
        net = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(LAYERS)])
        self.numel = sum(p.numel() for p in net.parameters())
        self.model = DistributedDataParallel(net, bucket_cap_mb=cap)
        self.handle: Any = None
        if row is not None and row.theirs:
            attach_pytorch(self.model, row.hook.removeprefix(THEIRS))
        elif row is not None:
            self.handle = commhooks.attach(self.model, row.hook)
        self._batch = torch.randn(4, width, dtype=torch.float32, device="cpu")

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.model.zero_grad(set_to_none=True)
            self.model(self._batch).pow(2).mean().backward()

    def resident(self) -> int:
        gc.collect()
        return resident("VmRSS")


def measure(rank: int, world: int, row: HookMemory | None, cap: int) -> tuple[float, float]:
    """Return the bytes per parameter of this process at rest and at the peak, model and gradients included."""
    training = Training(row, cap, WIDTH)
    training.steps(4)  # DDP rebuilds its buckets, hooks make scratch and state
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    training.steps(2)
    peak = resident("VmHWM")
    if training.handle is not None:
        training.handle.assert_active()
    return training.resident() / training.numel, peak / training.numel


def measure_growth(rank: int, world: int, row: HookMemory | None, steps: tuple[int, int] = (100, 1000)) -> float:
    """Return the MiB of resident memory that the steps between the two counts add, with three buckets."""
    training = Training(row, 4 * LAYERS * SMALL**2 / 3 / 2**20, SMALL)
    training.steps(steps[0])
    before = training.resident()
    training.steps(steps[1] - steps[0])
    return (training.resident() - before) / 2**20


def table(chosen: list[HookMemory]) -> str:
    """Return the bytes per parameter of every hook minus plain DDP's, as Markdown."""
    heads = ["hook", "at rest, one bucket", "at the peak, one bucket", "at rest, 25 MB buckets"]
    heads += ["at the peak, 25 MB buckets", "counted", "tensors"]
    plain = {cap: spawn(measure, 2, None, cap, timeout=900, group_timeout=600)[0] for cap in (WHOLE, DEFAULT)}
    rows = []
    for row in chosen:
        cells = []
        for cap in (WHOLE, DEFAULT):
            if row.theirs and cap == DEFAULT:  # PyTorch's PowerSGD hangs with several buckets
                cells += ["–", "–"]
                continue
            found = spawn(measure, 2, row, cap, timeout=900, group_timeout=600)[0]
            cells += [f"{have - without:.1f}" for have, without in zip(found, plain[cap], strict=True)]
        rows.append([row.label, *cells, f"{row.counted:g}", row.tensors or "–"])
        print(*rows[-1], sep=" | ", flush=True)
    return markdown_table(heads, rows)


def growth(chosen: list[HookMemory]) -> str:
    """Return the memory that 900 steps add to every hook and to plain DDP, as Markdown."""
    rows = []
    for row in (None, *(row for row in chosen if not row.theirs)):
        added = spawn(measure_growth, 2, row, timeout=900, group_timeout=600)[0]
        rows.append(["plain DDP" if row is None else row.label, f"{added:.1f}"])
        print(*rows[-1], sep=" | ", flush=True)
    return markdown_table(["hook", "MiB more after 1 000 steps than after 100"], rows)


def main(argv: list[str] | None = None) -> None:
    """Measure, print, and write the record if requested."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="WORD", help="hooks with this word in their expression")
    parser.add_argument("--record", action="store_true", help="write the tables to docs/measured/cost-table.md")
    chosen = parser.parse_args(argv)
    rows = [row for row in HOOKS if chosen.only in row.hook]
    found = f"{table(rows)}\n\n### Over 1 000 steps\n\n{growth(rows)}"
    if chosen.record:
        made_by = command("programs.cost.memory", argv, environment="OMP_NUM_THREADS=1")
        write("cost-table", "Memory held", made_by, found, "2 gloo processes")


if __name__ == "__main__":
    run_main(main)
