"""Resident memory of a gather of FSDP2 weights, with torch's own all-gather and with hooks.

    python -m ch_bench.fsdp2.memory [HOOK ...] [--record]

Two gloo processes shard three matrices of 3072 x 3072 in fp32 (37.7 MB each, a group each), and run three forwards without
gradients. The program reads the growth of the resident memory since attach (``VmHWM`` after a reset, and ``VmRSS``), and prints
the larger of the two ranks. New processes run for each hook. Linux only.

The limit is torch's own peak plus the codes of one group. glibc keeps freed blocks below a threshold that grows to 32 MB. Gloo
copies each gather's output, and torch's copy of 37.7 MB is above this threshold while a copy of codes is below it. Therefore
each hook also runs with a fixed threshold of 1 MB (``MALLOC_MMAP_THRESHOLD_``), where freed blocks leave the process.
"""

import argparse
import gc
import json
import os
import subprocess
import sys
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import commhooks
from ch_bench import record
from ch_bench.cost.memory import resident
from ch_bench.fsdp2.quality import DIFFERENCE
from commhooks import BucketLayout, StepContext
from commhooks.adapters import Gathered
from commhooks.testing import spawn

WIDTH, DEPTH, WORLD, FORWARDS = 3072, 3, 2, 3
OWN = "torch's own"
HOOKS = (OWN, "allreduce", "bf16_compress", "quant8", "quant4", DIFFERENCE)
THRESHOLD = "MALLOC_MMAP_THRESHOLD_"


def coded(hook: str) -> int:
    """Return the bytes of the codes of one group; 0 for numbers that travel as they are."""
    if hook in (OWN, "allreduce"):
        return 0
    layout = BucketLayout.of_shapes({"w": (WIDTH, WIDTH)})
    reduction = commhooks.create(hook).reduction
    assert reduction is not None
    [[request]] = Gathered(reduction).plan(layout, StepContext(world_size=WORLD, step=1))
    return request.payload_bytes


def worker(rank: int, world: int, hook: str) -> tuple[float, float, float]:
    """Return peak, resident memory afterwards and the codes of one group, in MB."""
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (world,))
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH)))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if hook != OWN:
        commhooks.attach(model, hook, axis="gather")
    x = torch.randn(4, WIDTH, dtype=torch.float32, device="cpu")
    gc.collect()
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    with torch.no_grad():
        for _ in range(FORWARDS):
            model(x)
    peak, after = resident("VmHWM") - before, resident("VmRSS") - before
    return peak / 1e6, after / 1e6, coded(hook) / 1e6


def measure(hook: str, threshold: str | None) -> tuple[float, float, float]:
    """Return the larger figures of the two ranks, from a new process, because glibc reads its threshold at the start."""
    kept = {name: value for name, value in os.environ.items() if name != THRESHOLD}
    code = f"from ch_bench.fsdp2 import memory; print(memory.largest({hook!r}))"
    env = kept if threshold is None else {**kept, THRESHOLD: threshold}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, text=True, timeout=180, check=True
    )
    peak, after, codes = json.loads(done.stdout)
    return peak, after, codes


def largest(hook: str) -> str:
    """Return the larger figures of two ranks as JSON."""
    every = spawn(worker, WORLD, hook, timeout=120.0)
    return json.dumps([max(column) for column in zip(*every, strict=True)])


def main(argv: list[str] | None = None) -> int:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("hooks", nargs="*", default=list(HOOKS), help=f"default {', '.join(HOOKS)}")
    parser.add_argument("--record", action="store_true", help="write the table to docs/measured/fsdp2-gather.md")
    args = parser.parse_args(argv)
    rows: list[list[str]] = []
    own: dict[str | None, float] = {}
    for hook in dict.fromkeys([OWN, *args.hooks]):
        cells: list[str] = []
        codes = 0.0
        for threshold in (None, "1000000"):
            peak, after, codes = measure(hook, threshold)
            own.setdefault(threshold, peak)
            more = peak - own[threshold] - codes
            holds = "" if hook == OWN else f"{more:+.1f}: {'holds' if more <= 0 else 'MISSED'}"
            cells += [f"{peak:.1f}", f"{after:.1f}", holds]
        rows.append([hook if hook == OWN else f"`{hook}`", f"{codes:.1f}" if codes else "", *cells])
    each = ["at the peak", "afterwards", "above torch's own and codes"]
    heads = ["hook", "codes", *each, *(f"{one}, fixed threshold" for one in each)]
    shown = record.markdown_table(heads, rows)
    print(shown)
    if args.record:
        made_by = record.command("ch_bench.fsdp2.memory", argv)
        record.write(
            "fsdp2-gather",
            "Memory of a gather",
            made_by,
            shown,
            "MB, the larger of two gloo ranks; three matrices of 37.7 MB, a group each, three forwards without gradients",
            "other programs ran on the machine. Without the fixed threshold, peaks differ by up to 20 MB between runs",
            "fixed threshold: glibc with MALLOC_MMAP_THRESHOLD_=1000000, so that freed blocks of gloo leave the process",
        )
    return 0


if __name__ == "__main__":
    record.run_main(main)
