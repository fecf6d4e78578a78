"""How costs grow: `python -m ch_bench.cost.scale` (eight minutes on two quiet cores; `--small` for a try).

    OMP_NUM_THREADS=1 python -m ch_bench.cost.scale --out docs/measured/scale.md

Measured over gloo processes: a step of each hook against the number of parameters (with the slope), of buckets, and of ranks.
Without other ranks, up to 256 of them: planning, and one rank's own part of a step. What needs no clock is
counted by ``ch_bench.counted.ranks``. ``docs/scale.md`` carries this on to 1 000 ranks.
"""

import argparse
import math
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import commhooks
from ch_bench.bench_report import command, digits, heading
from ch_bench.cost.table import measured
from ch_bench.gpu_kit.models import PYTORCHS, ShapesOnly, made_up
from ch_bench.shapes import gpt_shapes
from commhooks import Bucket, BucketLayout, StepContext
from commhooks.testing import spawn

HOOKS = ["allreduce", "bf16_compress", "powersgd(rank=1)", "powersgd(rank=4)", "quant8"]
GATHERING = ["quantize_per_tensor", "quant8(error_feedback=True)", "topk", "bf16_compress(accumulate='fp32')"]
LARGE_HOOKS = ["powersgd(rank=4)"]
GPTS = {  # parameters in millions -> layers, width, vocabulary, context
    1: (2, 192, 96, 128),
    11: (6, 384, 96, 128),
    30: (6, 640, 96, 128),
    100: (8, 1024, 96, 128),
    300: (24, 1024, 96, 128),
}
BUCKETS = (1, 3, 10, 40)
WORLDS = (2, 4, 8, 32, 64, 256)
"""Simulated; of real processes, :data:`RANKS`."""
RANKS = (2, 4)


def against_parameters(hooks: Sequence[str], millions: Sequence[int], steps: int) -> list[str]:
    """Milliseconds of a step in one bucket over two ranks, and the exponent of the growth between the two largest."""
    lines = [f"| hook | {' | '.join(f'{m} M' for m in millions)} | slope |", "|---" * (len(millions) + 2) + "|"]
    for hook in hooks:
        sizes = [m for m in millions if m < 300 or hook in LARGE_HOOKS]
        found = [measured(hook, GPTS[m], max(3, steps // max(1, m // 30)))["step"] for m in sizes]
        slope = math.log(found[-1] / found[-2]) / math.log(sizes[-1] / sizes[-2]) if len(found) > 1 else math.nan
        cells = [*map(digits, found)] + [""] * (len(millions) - len(found))
        lines.append(f"| `{hook}` | {' | '.join(cells)} | {slope:.2f} |")
        print(lines[-1], flush=True)
    return lines


def against_buckets(
    hooks: Sequence[str], buckets: Sequence[int], sizes: tuple[int, int, int, int], steps: int
) -> list[str]:
    """Milliseconds of a step over two ranks, by the number of buckets; where PyTorch has the same hook, both in turns. Not its
    PowerSGD, whose buckets' messages mix up as soon as there are two.
    """
    lines = [f"| hook | {' | '.join(f'{n} buckets' for n in buckets)} |", "|---" * (len(buckets) + 1) + "|"]
    for hook in hooks:
        peer = hook in PYTORCHS and not hook.startswith("powersgd")
        found = [measured(hook, sizes, steps, buckets=n, peer=peer) for n in buckets]
        for name, what in (("step", f"`{hook}`"), *([("theirs", f"PyTorch's `{hook}`")] if peer else [])):
            lines.append(f"| {what} | {' | '.join(digits(each[name]) for each in found)} |")
            print(lines[-1], flush=True)
    return lines


def against_ranks(
    hooks: Sequence[str], ranks: Sequence[int], sizes: tuple[int, int, int, int], steps: int
) -> list[str]:
    """Milliseconds of a step in one bucket, by the number of processes: on this machine they share the cores."""
    lines = [f"| hook | {' | '.join(f'{n} ranks' for n in ranks)} |", "|---" * (len(ranks) + 1) + "|"]
    for hook in hooks:
        cells = [digits(measured(hook, sizes, steps, world=n)["step"]) for n in ranks]
        lines.append(f"| `{hook}` | {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    return lines


def planning(hooks: Sequence[str], worlds: Sequence[int], sizes: tuple[int, int, int, int]) -> list[str]:
    """Milliseconds that planning a step takes, by ranks; done once for each layout."""
    lines = [f"| hook | {' | '.join(f'{w} ranks' for w in worlds)} |", "|---" * (len(worlds) + 1) + "|"]
    layout = BucketLayout.of_shapes(gpt_shapes(*sizes))
    for hook in hooks:
        reduction = commhooks.create(hook).reduction
        assert reduction is not None
        reduction.plan(layout, StepContext(world_size=worlds[0]))  # imports what it needs
        cells = []
        for world in worlds:
            begun = time.perf_counter()
            reduction.plan(layout, StepContext(world_size=world))
            cells.append(digits(1e3 * (time.perf_counter() - begun)))
        lines.append(f"| `{hook}` | {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    return lines


def own_work(hooks: Sequence[str], worlds: Sequence[int], numel: int) -> list[str]:
    """Milliseconds of one rank's own part of a step, what it makes of all others' messages included: the reduction alone, on
    requests that are answered at once with what this rank sent.
    """
    lines = [f"| hook | {' | '.join(f'{w} ranks' for w in worlds)} |", "|---" * (len(worlds) + 1) + "|"]
    for hook in hooks:
        cells = [digits(_own(hook, world, numel)) for world in worlds]
        lines.append(f"| `{hook}` | {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    return lines


def _own(hook: str, world: int, numel: int) -> float:
    reduction = commhooks.create(hook).reduction
    assert reduction is not None
    side = math.isqrt(numel)
    bucket = Bucket.from_tensors({"w": torch.randn(side, side)})
    ctx = StepContext(0, world)
    times = []
    for _ in range(5):
        begun = time.perf_counter()
        for requests in reduction.start(bucket, ctx):
            for request in requests if isinstance(requests, tuple) else (requests,):
                _answer(request)
        times.append(1e3 * (time.perf_counter() - begun))
    return statistics.median(times)


def _answer(request: commhooks.Request) -> None:
    """As if all ranks had sent the same."""
    if isinstance(request, commhooks.AllReduce):
        if request.sent is not None:
            request.sent.copy_(request.tensor)
    elif isinstance(request, commhooks.AllGather):
        request.output.view(-1, request.input.numel()).copy_(request.input.view(1, -1))
    elif isinstance(request, commhooks.AllToAll):
        request.output.copy_(request.input)
    else:
        request.output.copy_(request.input[: request.output.numel()])


def agreeing(ranks: Sequence[int], sizes: tuple[int, int, int, int]) -> list[str]:
    """Milliseconds of ``attach``, in which all ranks compare hook, versions and shapes over the group's store, and without."""
    lines = ["| ranks | with agreement | without |", "|---|---|---|"]
    for world in ranks:
        found = spawn(_attaching, world, sizes, timeout=300)
        lines.append(f"| {world} | {max(told for told, _ in found):.0f} | {max(alone for _, alone in found):.0f} |")
        print(lines[-1], flush=True)
    return lines


def _attaching(rank: int, world: int, sizes: tuple[int, int, int, int]) -> tuple[float, float]:
    given = made_up(gpt_shapes(*sizes), torch.float32, torch.device("cpu"))
    model = DistributedDataParallel(ShapesOnly(given))
    found = []
    for verify in (True, True, False):  # the first imports what is needed
        dist.barrier()
        begun = time.perf_counter()
        handle = commhooks.attach(model, "powersgd(rank=4)", verify_ranks=verify)
        found.append(1e3 * (time.perf_counter() - begun))
        handle.detach()
    return found[1], found[2]


def record(args: argparse.Namespace) -> str:
    """All tables, as Markdown."""
    small = args.small
    gpt = GPTS[1 if small else 11]
    hooks, steps = (HOOKS[:1], 3) if small else (HOOKS, 20)
    millions = (1,) if small else (*(m for m in GPTS if m < 300), *((300,) if args.largest else ()))
    parts: list[tuple[str, Callable[[], list[str]]]] = [
        ("ms of a step, by parameters (two ranks, one bucket)", lambda: against_parameters(hooks, millions, steps)),
        ("ms of a step, by buckets", lambda: against_buckets(hooks, BUCKETS[:2] if small else BUCKETS, gpt, steps)),
        ("ms of a step, by processes", lambda: against_ranks(hooks, RANKS[:1] if small else RANKS, gpt, steps)),
        ("ms of planning, by ranks", lambda: planning([*HOOKS, *GATHERING], WORLDS[: 3 if small else None], gpt)),
        ("ms of a rank's own work, 1 M parameters", lambda: own_work(HOOKS, WORLDS, 1 << (12 if small else 20))),
        ("ms of attach, by processes", lambda: agreeing(RANKS[:1] if small else RANKS, gpt)),
    ]
    lines = []
    for title, make in parts:
        print(f"== {title}", flush=True)
        lines += [f"## {title}", "", *make(), ""]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    """Measure, print, and write the record if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="tiny shapes, few steps")
    parser.add_argument("--largest", action="store_true", help="300 M parameters, too")
    parser.add_argument("--out", type=Path, help="write the tables, with machine and versions, to this file")
    chosen = parser.parse_args(argv)
    found = record(chosen)
    if chosen.out is not None:
        about = heading("How costs grow", command("ch_bench.cost.scale", argv, environment="OMP_NUM_THREADS=1"))
        chosen.out.write_text(f"{about}\n{__doc__}\n{found}\n")


if __name__ == "__main__":
    main()
