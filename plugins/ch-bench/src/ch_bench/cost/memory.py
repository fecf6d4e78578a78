"""What each hook holds beside the model, in bytes per parameter: at rest between steps, and at the peak inside one.

    OMP_NUM_THREADS=1 python -m ch_bench.cost.memory --out docs/measured/memory.md

Two gloo processes train twelve bias-free 2048 x 2048 layers (50.3 M parameters, fp32). Each hook runs in fresh
processes. What is read is the process's resident memory (``VmRSS``, and ``VmHWM`` after a reset of the peak), so that
what the allocator keeps counts as well; from it the figure of plain DDP with the same buckets is subtracted. Linux only.
"""

import argparse
import gc
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as theirs
from torch.nn.parallel import DistributedDataParallel

import commhooks
from ch_bench.bench_report import command, heading
from commhooks.testing import spawn

PYTORCH = "PyTorch's powerSGD_hook, rank 4"
HOOKS = [
    "allreduce",
    "bf16_compress",
    "bf16_compress(accumulate='fp32')",
    PYTORCH,
    "powersgd(rank=4)",
    "powersgd(rank=4, error_feedback=False)",
    "bf16_wrapper(powersgd(rank=4))",
    "batched_powersgd(rank=4)",
    "error_feedback(bf16_compress)",
    "quant8",
]
LAYERS, WIDTH = 12, 2048
WHOLE, DEFAULT = 1000, 25  # MB: one bucket, and DDP's default


def resident(field: str) -> int:
    """``VmRSS`` or ``VmHWM`` of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def measure(rank: int, world: int, hook: str | None, cap: int) -> tuple[float, float]:
    """``(at rest, at the peak)`` of this process in bytes per parameter, model and gradients included."""
    net = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])
    numel = sum(p.numel() for p in net.parameters())
    model = DistributedDataParallel(net, bucket_cap_mb=cap)
    handle: Any = None
    if hook == PYTORCH:
        state = theirs.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
        model.register_comm_hook(state, theirs.powerSGD_hook)
    elif hook is not None:
        handle = commhooks.attach(model, hook)
    batch = torch.randn(4, WIDTH)

    def steps(count: int) -> None:
        for _ in range(count):
            model.zero_grad(set_to_none=True)
            model(batch).pow(2).mean().backward()

    steps(5)  # buckets are rebuilt, scratch and state are made
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    steps(3)
    peak = resident("VmHWM")
    gc.collect()
    if handle is not None:
        handle.assert_active()
    return resident("VmRSS") / numel, peak / numel


def table() -> str:
    """The figures of every hook over plain DDP's, as Markdown."""
    lines = [
        "| hook | at rest, one bucket | at the peak, one bucket | at rest, 25 MB buckets | at the peak, 25 MB buckets |",
        "|---|---|---|---|---|",
    ]
    plain = {cap: spawn(measure, 2, None, cap, timeout=300)[0] for cap in (WHOLE, DEFAULT)}
    for hook in HOOKS:
        cells = []
        for cap in (WHOLE, DEFAULT):
            if hook == PYTORCH and cap == DEFAULT:  # it survives one bucket only
                cells += ["–", "–"]
                continue
            found = spawn(measure, 2, hook, cap, timeout=300)[0]
            cells += [f"{have - without:.1f}" for have, without in zip(found, plain[cap], strict=True)]
            print(hook, cap, cells[-2:], flush=True)
        lines.append(f"| {hook if hook == PYTORCH else f'`{hook}`'} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Measure, print, and write the record if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the table, with machine and versions, to this file")
    chosen = parser.parse_args()
    found = table()
    print(found)
    if chosen.out is not None:
        about = heading("Memory beside the model", command("ch_bench.cost.memory"), "2 gloo processes")
        chosen.out.write_text(
            f"{about}\nBytes per parameter over plain DDP with the same buckets, resident memory of a process, "
            f"{LAYERS} layers of {WIDTH} x {WIDTH} in fp32.\n\n{found}\n"
        )


if __name__ == "__main__":
    main()
