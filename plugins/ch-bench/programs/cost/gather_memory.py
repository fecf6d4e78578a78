"""Resident memory of a gather of FSDP2 weights, with torch's own all-gather and with hooks.

    python -m programs.cost.gather_memory [HOOK ...] [--ranks N] [--repeats N] [--record]

Gloo processes shard three matrices of 3072 x 3072 in fp32 (37.7 MB each, a group each), and run three forwards without
gradients. The program reads the growth of the resident memory since attach (``VmHWM`` after a reset, and ``VmRSS``). It prints
the largest figures of all ranks and repeats, and the least of torch's own. New processes run for each measurement. Linux only.

The limit is torch's own peak and the codes of one group. glibc's allocator has its defaults, so it keeps freed blocks of up to
32 MB for each thread.
"""

import argparse
import gc
import platform
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import commhooks
from ch_bench import record
from ch_core import Gathered
from ch_testing import spawn
from commhooks import BucketLayout, StepContext
from programs.cost.memory import resident

WIDTH, DEPTH, FORWARDS = 3072, 3, 3
OWN = "torch's own"
HOOKS = ("allreduce", "bf16_compress", "quant8", "quant4")


def coded(hook: str, world: int) -> float:
    """Return the MB of the codes of one group, 0 for numbers that travel as they are."""
    if hook in (OWN, "allreduce"):
        return 0.0
    layout = BucketLayout.of_shapes({"w": (WIDTH, WIDTH)})
    reduction = commhooks.create(hook).reduction
    assert reduction is not None
    [[request]] = Gathered(reduction).plan(layout, StepContext(world_size=world))
    return request.payload_bytes / 1e6


def worker(rank: int, world: int, hook: str) -> tuple[float, float]:
    """Return the growth of the resident memory at its peak and afterwards, in MB."""
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
    return peak / 1e6, after / 1e6


def measure(hook: str, world: int, repeats: int = 1) -> list[tuple[float, float]]:
    """Return the figures of all ranks and repeats. New processes run for each repeat."""
    return [row for _ in range(repeats) for row in spawn(worker, world, hook, timeout=240.0)]


def cells(hook: str, world: int, repeats: int, own: float) -> list[str]:
    """Return peak, memory afterwards, and the difference of the peak and its limit."""
    peak, after = (max(column) for column in zip(*measure(hook, world, repeats), strict=True))
    more = peak - own - coded(hook, world)
    return [f"{peak:.1f}", f"{after:.1f}", f"{more:+.1f}: {'holds' if more <= 0 else 'MISSED'}"]


def table(hooks: list[str], worlds: list[int], repeats: int) -> str:
    """Measure all hooks and return the table."""
    own = {world: [min(column) for column in zip(*measure(OWN, world, repeats), strict=True)] for world in worlds}
    rows = [[OWN, "", *(cell for peak, after in own.values() for cell in (f"{peak:.1f}", f"{after:.1f}", ""))]]
    for hook in hooks:
        codes = coded(hook, worlds[0])
        size = f"{codes:.1f}" if codes else ""
        rows.append([f"`{hook}`", size, *(cell for w in worlds for cell in cells(hook, w, repeats, own[w][0]))])
    each = ("at the peak", "afterwards", "above the limit")
    return record.markdown_table(["hook", "codes", *(f"{e}, {w} ranks" for w in worlds for e in each)], rows)


def main(argv: list[str] | None = None) -> int:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("hooks", nargs="*", default=list(HOOKS), help=f"default {', '.join(HOOKS)}")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="default 2 4")
    parser.add_argument("--repeats", type=int, default=3, help="default 3")
    parser.add_argument("--record", action="store_true", help="write the table to docs/measured/fsdp2-gather.md")
    args = parser.parse_args(argv)
    shown = table(args.hooks, args.ranks, args.repeats)
    print(shown)
    if args.record:
        made_by = record.command("programs.cost.gather_memory", argv)
        record.write(
            "fsdp2-gather",
            "Memory of a gather",
            made_by,
            shown,
            "MB; three matrices of 37.7 MB, a group each, three forwards without gradients; gloo, "
            f"{' '.join(platform.libc_ver())} with its defaults",
            f"the largest of all ranks and {args.repeats} runs, and the least of torch's own; other programs ran on the machine",
            "the limit: torch's own peak and codes",
        )
    return 0


if __name__ == "__main__":
    record.run_main(main)
