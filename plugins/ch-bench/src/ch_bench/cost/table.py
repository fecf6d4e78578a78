"""What every hook costs, and where: `python -m ch_bench.cost.table` (a quarter of an hour on two cores; `--small` for a try).

    OMP_NUM_THREADS=1 python -m ch_bench.cost.table --out docs/measured/cost-table.md

Two gloo processes over loopback; a backward hands over given gradients (the shapes of a GPT of 10.7 M parameters, fp32, one
bucket), so that a step costs what its hook costs. Columns, in milliseconds per million parameters, medians over the steps:

* before: encoding, casting and starting, until everything has been asked for, what is done between two collectives included;
* waiting: for messages, and the cast back to the gradient's dtype;
* after: decoding;
* step: the whole backward, less that of the same model with ``noop``, in turns.

ATen calls are those of a whole backward, ``noop``'s included: the profiler's count, with operations inside of others, without
those that PyTorch's hooks run on threads of their own. Bytes per parameter at the peak are those of ``ch_bench.cost.memory``.
PyTorch's hooks stand below ours; from outside only their step can be timed.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

import commhooks
from ch_bench.bench_report import command, heading
from ch_bench.cost import memory
from ch_bench.gpu_kit.models import PYTORCHS, ShapesOnly, made_up, register_torch
from ch_bench.shapes import gpt_shapes
from commhooks import Bucket, Composite, Reduction, Stages, StepContext
from commhooks.testing import spawn

Sizes = tuple[int, int, int, int]  # layers, width, vocabulary, context
GPT, SMALL = (6, 384, 96, 128), (1, 64, 96, 16)
STEPS = 25
_OWN = ("noop", "allreduce", "bf16_compress", "fp16_compress", "powersgd(rank=1)", "powersgd(rank=4)")


class Timed(Composite):
    """A reduction whose time is taken: until it has asked for everything, and after it has got everything."""

    name = "timed"
    delivers = True  # if the reduction inside does: nothing is done behind it

    def __init__(self, inner: Reduction) -> None:
        super().__init__(inner)
        self.after: list[float] = []

    def run(self, bucket: Bucket, ctx: StepContext) -> Stages:
        begun = time.perf_counter()
        for requests in self.inner.start(bucket, ctx):
            yield requests
            begun = time.perf_counter()
        self.after.append(time.perf_counter() - begun)


def measure(
    rank: int, world: int, hook: str, torchs: bool, sizes: Sizes, steps: int, buckets: int = 1
) -> dict[str, float]:
    """One hook on one rank: milliseconds of a step, and ATen calls."""
    torch.set_num_threads(1)
    given = made_up(gpt_shapes(*sizes), torch.float32, torch.device("cpu"))
    cap = 1e6 if buckets == 1 else sum(g.nbytes for g in given) / buckets / 2**20
    models = [DistributedDataParallel(ShapesOnly(given), bucket_cap_mb=cap, gradient_as_bucket_view=True) for _ in "ab"]
    commhooks.attach(models[0], "noop")
    handle, timed = None, None
    if torchs:
        register_torch(models[1], hook)
    else:
        reduction = commhooks.create(hook).reduction
        assert reduction is not None
        timed = Timed(reduction)
        handle = commhooks.attach(models[1], timed)
    calls = [_stepping(model) for model in models]
    for _ in range(4):  # buckets are rebuilt, PyTorch's PowerSGD begins
        for call in calls:
            call()
    before = handle.stats() if handle is not None else {}
    if timed is not None:
        timed.after.clear()
    taken: list[list[float]] = [[], []]
    for step in range(steps):
        for which in (0, 1) if step % 2 else (1, 0):
            torch.distributed.barrier()
            begun = time.perf_counter()
            calls[which]()
            taken[which].append(time.perf_counter() - begun)
    found = {"step": statistics.median(taken[1]) - statistics.median(taken[0])}
    if handle is not None and timed is not None:
        stats = handle.stats()
        hooked, waiting = (stats[name] - before[name] for name in ("hook_seconds", "wait_seconds"))
        after = sum(timed.after)
        found |= {"before": (hooked - waiting - after) / steps, "waiting": waiting / steps, "after": after / steps}
    return {name: 1e3 * seconds for name, seconds in found.items()} | {"aten": float(_operations(calls[1]))}


def measure_step(hook: str, sizes: Sizes, world: int, buckets: int, steps: int) -> float:
    """Milliseconds of a step, less ``noop``'s."""
    found: dict[str, float] = spawn(measure, world, hook, False, sizes, steps, buckets, timeout=600)[0]
    return found["step"]


def _stepping(model: DistributedDataParallel) -> Callable[[], None]:
    def step() -> None:
        model.zero_grad(set_to_none=False)
        model().backward()

    return step


def _operations(step: Callable[[], None]) -> int:
    with profile(activities=[ProfilerActivity.CPU]) as found:
        step()
    return sum(event.name.startswith("aten::") for event in found.events())


def hooks() -> list[str]:
    """Every registered reduction by its example, and PowerSGD of rank 1."""
    examples = [spec.example or spec.name for spec in commhooks.list_hooks(kind="reduction")]
    return list(dict.fromkeys([*_OWN, *examples, "batched_powersgd(rank=4)", "error_feedback(bf16_compress)"]))


def table(chosen: list[str], sizes: Sizes, steps: int, *, with_memory: bool) -> str:
    """The table, as Markdown."""
    millions = sum(torch.Size(s).numel() for s in gpt_shapes(*sizes).values()) / 1e6
    lines = [
        "| hook | before | waiting | after | step | ATen calls | peak, B/parameter |",
        "|---|---|---|---|---|---|---|",
    ]
    plain = spawn(memory.measure, 2, None, memory.WHOLE, timeout=300)[0][1] if with_memory else 0.0
    for hook, torchs in [
        *((hook, False) for hook in chosen),
        *((hook, True) for hook in (PYTORCHS if with_memory else PYTORCHS[:1])),
    ]:
        found = spawn(measure, 2, hook, torchs, sizes, steps, timeout=300)[0]
        cells = [
            f"{found[name] / millions:.3f}" if name in found else "" for name in ("before", "waiting", "after", "step")
        ]
        name = f"PyTorch's {hook}" if torchs else f"`{hook}`"
        peak = "" if not with_memory else _peak(hook, torchs, plain)
        lines.append(f"| {name} | {' | '.join(cells)} | {found['aten']:.0f} | {peak} |")
        print(lines[-1], flush=True)
    return "\n".join(lines)


def _peak(hook: str, torchs: bool, plain: float) -> str:
    if torchs and hook != "powersgd(rank=4)":
        return ""
    row = memory.Row(memory.PYTORCH if torchs else hook)
    measured: Any = spawn(memory.measure, 2, row, memory.WHOLE, timeout=300)[0][1]
    return f"{measured - plain:.1f}"


def main(argv: list[str] | None = None) -> None:
    """Measure, print, and write the record if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("hooks", nargs="*", help="expressions; default: all")
    parser.add_argument("--small", action="store_true", help="tiny shapes, few steps, no memory")
    parser.add_argument("--out", type=Path, help="write the table, with machine and versions, to this file")
    chosen = parser.parse_args(argv)
    sizes, steps = (SMALL, 3) if chosen.small else (GPT, STEPS)
    found = table(chosen.hooks or hooks(), sizes, steps, with_memory=not chosen.small)
    if chosen.out is not None:
        about = heading("What every hook costs", command("ch_bench.cost.table", argv), "2 gloo processes")
        chosen.out.write_text(f"{about}\n{__doc__}\n{found}\n")


if __name__ == "__main__":
    main()
