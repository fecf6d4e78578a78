"""Time, operations and peak memory of every hook, by phase of a step.

    OMP_NUM_THREADS=1 python -m ch_bench.cost.table --record

This takes half an hour on two cores; ``--small`` is a short trial. Two gloo processes run over loopback. The backward only
hands over given gradients (the shapes of a GPT of 10.7 M parameters, fp32, one bucket). If PyTorch has the same hook, both
hooks and ``noop`` take turns in random order in the same processes. Times are medians, in milliseconds per million
parameters:

* before: encoding, casting and starting, until the last collective is requested;
* waiting: for messages, and the cast back to the gradient's dtype;
* after: decoding;
* step: the whole backward minus the backward with ``noop``. This is the only time that PyTorch's hooks show;
* ratio: of the two steps, each minus ``noop``: median over blocks of five rounds, and 95 % interval.

ATen calls are the profiler's count for a whole backward with nested operations, without the threads of PyTorch's hooks.
Peak bytes per parameter are those of ``ch_bench.cost.memory``: beyond model and gradients, minus plain DDP's.
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

import commhooks
from ch_bench.cost import memory
from ch_bench.pytorch_hooks import PYTORCH, attach_pytorch, reduction_of
from ch_bench.record import command, digits, interval, markdown_table, run_main, write
from ch_bench.shapes import ShapesOnly, Sizes, gpt_shapes, random_gradients
from commhooks import Bucket, Composite, Reduction, Stages, StepContext
from commhooks.testing import spawn

GPT, SMALL = (6, 384, 96, 128), (1, 64, 96, 16)
STEPS, BLOCK = 50, 5
_OWN = ("noop", "allreduce", "bf16_compress", "fp16_compress", "powersgd(rank=1)", "powersgd(rank=4)")
_MORE = ("batched_powersgd(rank=4)", "error_feedback(bf16_compress)", "bf16_compress(accumulate='fp32')")


class Timed(Composite):
    """A reduction that times its work after the last collective."""

    name = "timed"
    delivers = True  # if the inner reduction does: this one changes nothing afterwards

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
    rank: int, world: int, hook: str, sizes: Sizes, steps: int, buckets: int = 1, with_pytorch: bool = False
) -> dict[str, Any]:
    """Return milliseconds and ATen calls of a step of one hook, and of PyTorch's counterpart if asked for."""
    torch.set_num_threads(1)
    given = random_gradients(gpt_shapes(*sizes), torch.float32, torch.device("cpu"))
    cap = 1e6 if buckets == 1 else sum(g.nbytes for g in given) / buckets / 2**20
    names = ("noop", "ours", "theirs") if with_pytorch else ("noop", "ours")
    models = {
        name: DistributedDataParallel(ShapesOnly(given), bucket_cap_mb=cap, gradient_as_bucket_view=True)
        for name in names
    }
    commhooks.attach(models["noop"], "noop")
    timed = Timed(reduction_of(hook))
    handle = commhooks.attach(models["ours"], timed)
    if with_pytorch:
        attach_pytorch(models["theirs"], hook)
    calls = {name: partial(_step, model) for name, model in models.items()}
    for _ in range(4):  # DDP rebuilds its buckets, PyTorch's PowerSGD starts to compress
        for call in calls.values():
            call()
    before = handle.stats()
    timed.after.clear()
    taken: dict[str, list[float]] = {name: [] for name in names}
    draw = random.Random(0)
    for _ in range(steps):
        for name in draw.sample(names, len(names)):
            dist.barrier()
            begun = time.perf_counter()
            calls[name]()
            taken[name].append(1e3 * (time.perf_counter() - begun))
    stats = handle.stats()
    hooked, waiting = (stats[name] - before[name] for name in ("hook_seconds", "wait_seconds"))
    after = sum(timed.after)
    phases = {"before": hooked - waiting - after, "waiting": waiting, "after": after}
    found: dict[str, Any] = {name: 1e3 * seconds / steps for name, seconds in phases.items()}
    noop = statistics.median(taken["noop"])
    found |= {"step": statistics.median(taken["ours"]) - noop, "aten": _operations(calls["ours"])}
    if with_pytorch:
        found |= {"theirs": statistics.median(taken["theirs"]) - noop, "their aten": _operations(calls["theirs"])}
        found["ratio"] = interval(_ratios(taken))
    return found


def _ratios(taken: dict[str, list[float]]) -> list[float]:
    """Return the ratio of ours to theirs, each minus ``noop``, for each block."""
    blocks = {
        name: [statistics.median(each[i : i + BLOCK]) for i in range(0, len(each), BLOCK)]
        for name, each in taken.items()
    }
    return [
        (ours - noop) / (theirs - noop)
        for noop, ours, theirs in zip(blocks["noop"], blocks["ours"], blocks["theirs"], strict=True)
    ]


def measured(
    hook: str, sizes: Sizes, steps: int, *, world: int = 2, buckets: int = 1, with_pytorch: bool = False
) -> dict[str, Any]:
    """Run :func:`measure` on ``world`` processes and return the result of rank 0."""
    found: dict[str, Any] = spawn(measure, world, hook, sizes, steps, buckets, with_pytorch, timeout=600)[0]
    return found


def _step(model: DistributedDataParallel) -> None:
    model.zero_grad(set_to_none=False)
    model().backward()


def _operations(step: Callable[[], None]) -> int:
    with profile(activities=[ProfilerActivity.CPU]) as found:
        step()
    return sum(event.name.startswith("aten::") for event in found.events())


def hooks() -> list[str]:
    """Return every registered reduction and wrapper by its example, and the counterparts of PyTorch's hooks."""
    examples = [
        spec.example or spec.name for kind in ("reduction", "wrapper") for spec in commhooks.list_hooks(kind=kind)
    ]
    return list(dict.fromkeys([*_OWN, *examples, *_MORE]))


def table(chosen: list[str], sizes: Sizes, steps: int, *, with_memory: bool) -> str:
    """Return the table as Markdown."""
    millions = sum(torch.Size(s).numel() for s in gpt_shapes(*sizes).values()) / 1e6
    heads = ["hook", "before", "waiting", "after", "step", "PyTorch's step", "ratio", "ATen calls", "PyTorch's"]
    heads += ["peak, B/parameter", "PyTorch's"]
    rows = []
    plain = spawn(memory.measure, 2, None, memory.WHOLE, timeout=300)[0][1] if with_memory else 0.0
    for hook in chosen:
        both = hook in PYTORCH
        found = measured(hook, sizes, steps, with_pytorch=both)
        times = [
            digits(found[name] / millions) if name in found else ""
            for name in ("before", "waiting", "after", "step", "theirs")
        ]
        ratio = "{:.2f} ({:.2f} … {:.2f})".format(*found["ratio"]) if both else ""
        peaks = [_peak(hook, plain), _peak(memory.THEIRS + hook, plain) if both else ""] if with_memory else ["", ""]
        rows.append([f"`{hook}`", *times, ratio, str(found["aten"]), str(found.get("their aten", "")), *peaks])
        print(*rows[-1], sep=" | ", flush=True)
    return markdown_table(heads, rows)


def _peak(hook: str, plain: float) -> str:
    return f"{spawn(memory.measure, 2, memory.HookMemory(hook), memory.WHOLE, timeout=300)[0][1] - plain:.1f}"


def main(argv: list[str] | None = None) -> None:
    """Measure, print, and write the record if requested."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("hooks", nargs="*", help="expressions; default: all")
    parser.add_argument("--small", action="store_true", help="tiny shapes, few steps, no memory")
    parser.add_argument("--record", action="store_true", help="write the table to docs/measured/cost-table.md")
    chosen = parser.parse_args(argv)
    for hook in chosen.hooks:
        reduction_of(hook)
    sizes, steps = (SMALL, 2 * BLOCK) if chosen.small else (GPT, STEPS)
    found = table(chosen.hooks or hooks(), sizes, steps, with_memory=not chosen.small)
    print(found)
    if chosen.record:
        made_by = command("ch_bench.cost.table", argv, environment="OMP_NUM_THREADS=1")
        write("cost-table", "Time, operations and peak memory", made_by, found, "2 gloo processes")


if __name__ == "__main__":
    run_main(main)
