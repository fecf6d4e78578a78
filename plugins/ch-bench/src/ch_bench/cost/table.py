"""What every hook costs, and where: `python -m ch_bench.cost.table` (six minutes on two cores; `--small` for a try).

    OMP_NUM_THREADS=1 python -m ch_bench.cost.table --out docs/measured/cost-table.md

Two gloo processes over loopback; a backward hands over given gradients (the shapes of a GPT of 10.7 M parameters, fp32, one
bucket), so that a step costs what its hook costs. Where PyTorch has the same hook, both stand in the same processes and step
in turns, with ``noop`` between them, in an order drawn anew each time. Columns, in milliseconds per million parameters, medians
over the steps:

* before: encoding, casting and starting, until everything has been asked for, what is done between two collectives included;
* waiting: for messages, and the cast back to the gradient's dtype;
* after: decoding;
* step: the whole backward, less that of the same model with ``noop``; of PyTorch's hook nothing else can be timed from outside;
* ratio: of the two steps, each less ``noop``'s: the median over blocks of five rounds, and its 95 % interval.

ATen calls are those of a whole backward, ``noop``'s included: the profiler's count, with operations inside of others, without
those that PyTorch's hooks run on threads of their own. Bytes per parameter at the peak are those of ``ch_bench.cost.memory``:
above the model and its gradient, over plain DDP's.
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

import commhooks
from ch_bench.bench_report import command, digits, heading, interval
from ch_bench.cost import memory
from ch_bench.gpu_kit.models import PYTORCHS, ShapesOnly, made_up, register_torch
from ch_bench.shapes import gpt_shapes
from commhooks import Bucket, Composite, Reduction, Stages, StepContext
from commhooks.testing import spawn

Sizes = tuple[int, int, int, int]  # layers, width, vocabulary, context
GPT, SMALL = (6, 384, 96, 128), (1, 64, 96, 16)
STEPS, BLOCK = 50, 5
_OWN = ("noop", "allreduce", "bf16_compress", "fp16_compress", "powersgd(rank=1)", "powersgd(rank=4)")
_MORE = ("batched_powersgd(rank=4)", "error_feedback(bf16_compress)", "bf16_compress(accumulate='fp32')")


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
    rank: int, world: int, hook: str, sizes: Sizes, steps: int, buckets: int = 1, peer: bool = False
) -> dict[str, Any]:
    """One hook on one rank: milliseconds of a step, and ATen calls; with ``peer`` PyTorch's of the same name, too."""
    torch.set_num_threads(1)
    given = made_up(gpt_shapes(*sizes), torch.float32, torch.device("cpu"))
    cap = 1e6 if buckets == 1 else sum(g.nbytes for g in given) / buckets / 2**20
    names = ("noop", "ours", "theirs") if peer else ("noop", "ours")
    models = {
        name: DistributedDataParallel(ShapesOnly(given), bucket_cap_mb=cap, gradient_as_bucket_view=True)
        for name in names
    }
    commhooks.attach(models["noop"], "noop")
    reduction = commhooks.create(hook).reduction
    assert reduction is not None
    timed = Timed(reduction)
    handle = commhooks.attach(models["ours"], timed)
    if peer:
        register_torch(models["theirs"], hook)
    calls = {name: partial(_step, model) for name, model in models.items()}
    for _ in range(4):  # buckets are rebuilt, PyTorch's PowerSGD begins
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
    if peer:
        found |= {"theirs": statistics.median(taken["theirs"]) - noop, "their aten": _operations(calls["theirs"])}
        found["ratio"] = interval(_ratios(taken))
    return found


def _ratios(taken: dict[str, list[float]]) -> list[float]:
    """Of ours to theirs, each less ``noop``'s, block by block."""
    blocks = {
        name: [statistics.median(each[i : i + BLOCK]) for i in range(0, len(each), BLOCK)]
        for name, each in taken.items()
    }
    return [
        (ours - noop) / (theirs - noop)
        for noop, ours, theirs in zip(blocks["noop"], blocks["ours"], blocks["theirs"], strict=True)
    ]


def measured(
    hook: str, sizes: Sizes, steps: int, *, world: int = 2, buckets: int = 1, peer: bool = False
) -> dict[str, Any]:
    """What rank 0 of ``world`` processes finds by :func:`measure`."""
    found: dict[str, Any] = spawn(measure, world, hook, sizes, steps, buckets, peer, timeout=600)[0]
    return found


def _step(model: DistributedDataParallel) -> None:
    model.zero_grad(set_to_none=False)
    model().backward()


def _operations(step: Callable[[], None]) -> int:
    with profile(activities=[ProfilerActivity.CPU]) as found:
        step()
    return sum(event.name.startswith("aten::") for event in found.events())


def hooks() -> list[str]:
    """Every registered reduction and wrapper by its example, and what stands for PyTorch's."""
    examples = [
        spec.example or spec.name for kind in ("reduction", "wrapper") for spec in commhooks.list_hooks(kind=kind)
    ]
    return list(dict.fromkeys([*_OWN, *examples, *_MORE]))


def table(chosen: list[str], sizes: Sizes, steps: int, *, with_memory: bool) -> str:
    """The table, as Markdown."""
    millions = sum(torch.Size(s).numel() for s in gpt_shapes(*sizes).values()) / 1e6
    lines = [
        "| hook | before | waiting | after | step | PyTorch's step | ratio | ATen calls | PyTorch's | peak, B/parameter | "
        "PyTorch's |",
        "|---" * 11 + "|",
    ]
    plain = spawn(memory.measure, 2, None, memory.WHOLE, timeout=300)[0][1] if with_memory else 0.0
    for hook in chosen:
        peer = hook in PYTORCHS
        found = measured(hook, sizes, steps, peer=peer)
        times = [
            digits(found[name] / millions) if name in found else ""
            for name in ("before", "waiting", "after", "step", "theirs")
        ]
        ratio = "{:.2f} ({:.2f} … {:.2f})".format(*found["ratio"]) if peer else ""
        peaks = [_peak(hook, plain), _peak(memory.THEIRS + hook, plain) if peer else ""] if with_memory else ["", ""]
        cells = [f"`{hook}`", *times, ratio, str(found["aten"]), str(found.get("their aten", "")), *peaks]
        lines.append(f"| {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    return "\n".join(lines)


def _peak(hook: str, plain: float) -> str:
    return f"{spawn(memory.measure, 2, memory.Row(hook), memory.WHOLE, timeout=300)[0][1] - plain:.1f}"


def main(argv: list[str] | None = None) -> None:
    """Measure, print, and write the record if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("hooks", nargs="*", help="expressions; default: all")
    parser.add_argument("--small", action="store_true", help="tiny shapes, few steps, no memory")
    parser.add_argument("--out", type=Path, help="write the table, with machine and versions, to this file")
    chosen = parser.parse_args(argv)
    sizes, steps = (SMALL, 2 * BLOCK) if chosen.small else (GPT, STEPS)
    found = table(chosen.hooks or hooks(), sizes, steps, with_memory=not chosen.small)
    if chosen.out is not None:
        made_by = command("ch_bench.cost.table", argv, environment="OMP_NUM_THREADS=1")
        chosen.out.write_text(f"{heading('What every hook costs', made_by, '2 gloo processes')}\n{__doc__}\n{found}\n")


if __name__ == "__main__":
    main()
