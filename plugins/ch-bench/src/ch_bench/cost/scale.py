"""Time of a step by parameters, buckets and processes, and work that needs no other rank by up to 256 ranks.

    OMP_NUM_THREADS=1 python -m ch_bench.cost.scale --record

This takes eight minutes on two idle cores; ``--small`` is a short trial. ``ch_bench.cost.ranks`` counts everything that needs
no clock.
"""

import argparse
import math
import statistics
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import commhooks
from ch_bench.cost.table import measured
from ch_bench.pytorch_hooks import PYTORCH, reduction_of
from ch_bench.record import command, digits, markdown_table, run_main, write
from ch_bench.shapes import ShapesOnly, Sizes, gpt_shapes, random_gradients
from commhooks import Bucket, BucketLayout, StepContext
from commhooks.testing import spawn

HOOKS = ["allreduce", "bf16_compress", "powersgd(rank=1)", "powersgd(rank=4)", "quant8"]
GATHERING = ["quantize_per_tensor", "quant8(error_feedback=True)", "topk", "bf16_compress(accumulate='fp32')"]
LARGE_HOOKS = ["powersgd(rank=4)"]
GPTS: dict[int, Sizes] = {  # by parameters in millions
    1: (2, 192, 96, 128),
    11: (6, 384, 96, 128),
    30: (6, 640, 96, 128),
    100: (8, 1024, 96, 128),
    300: (24, 1024, 96, 128),
}
BUCKETS = (1, 3, 10, 40)
WORLDS = (2, 4, 8, 32, 64, 256)  # simulated ranks
PROCESSES = (2, 4)


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    found = markdown_table(heads, rows)
    print(found, flush=True)
    return found


def against_parameters(hooks: Sequence[str], millions: Sequence[int], steps: int) -> str:
    """Return milliseconds of a step in one bucket over two ranks, and the exponent between the two largest sizes."""
    rows = []
    for hook in hooks:
        sizes = [m for m in millions if m < 300 or hook in LARGE_HOOKS]
        found = [measured(hook, GPTS[m], max(3, steps // max(1, m // 30)))["step"] for m in sizes]
        slope = math.log(found[-1] / found[-2]) / math.log(sizes[-1] / sizes[-2]) if len(found) > 1 else math.nan
        rows.append([f"`{hook}`", *map(digits, found), *[""] * (len(millions) - len(found)), f"{slope:.2f}"])
    return _table(["hook", *(f"{m} M" for m in millions), "slope"], rows)


def against_buckets(hooks: Sequence[str], buckets: Sequence[int], sizes: Sizes, steps: int) -> str:
    """Return milliseconds of a step over two ranks by the number of buckets, with PyTorch's hook if it exists.

    PyTorch's PowerSGD is left out: it mixes up the messages of two buckets.
    """
    rows = []
    for hook in hooks:
        both = hook in PYTORCH and not hook.startswith("powersgd")
        found = [measured(hook, sizes, steps, buckets=n, with_pytorch=both) for n in buckets]
        for key, name in (("step", f"`{hook}`"), *([("theirs", f"PyTorch's `{hook}`")] if both else [])):
            rows.append([name, *(digits(each[key]) for each in found)])
    return _table(["hook", *(f"{n} buckets" for n in buckets)], rows)


def against_processes(hooks: Sequence[str], processes: Sequence[int], sizes: Sizes, steps: int) -> str:
    """Return milliseconds of a step in one bucket by the number of processes, which share the cores."""
    rows = [[f"`{h}`", *(digits(measured(h, sizes, steps, world=n)["step"]) for n in processes)] for h in hooks]
    return _table(["hook", *(f"{n} ranks" for n in processes)], rows)


def planning(hooks: Sequence[str], worlds: Sequence[int], sizes: Sizes) -> str:
    """Return milliseconds to plan a step by the number of ranks. A plan is made once for each layout."""
    layout = BucketLayout.of_shapes(gpt_shapes(*sizes))
    rows = []
    for hook in hooks:
        reduction = reduction_of(hook)
        reduction.plan(layout, StepContext(world_size=worlds[0]))  # pay for the imports
        cells = []
        for world in worlds:
            begun = time.perf_counter()
            reduction.plan(layout, StepContext(world_size=world))
            cells.append(digits(1e3 * (time.perf_counter() - begun)))
        rows.append([f"`{hook}`", *cells])
    return _table(["hook", *(f"{w} ranks" for w in worlds)], rows)


def own_work(hooks: Sequence[str], worlds: Sequence[int], numel: int) -> str:
    """Return milliseconds of one rank's work in a step, decoding of all messages included.

    The reduction runs alone; every rank is assumed to send the same.
    """
    rows = [[f"`{hook}`", *(digits(_own(hook, world, numel)) for world in worlds)] for hook in hooks]
    return _table(["hook", *(f"{w} ranks" for w in worlds)], rows)


def _own(hook: str, world: int, numel: int) -> float:
    reduction = reduction_of(hook)
    side = math.isqrt(numel)
    bucket = Bucket.from_tensors({"w": torch.randn(side, side, dtype=torch.float32, device="cpu")})
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
    """Complete a request as if all ranks had sent the same."""
    if isinstance(request, commhooks.AllReduce):
        if request.sent is not None:
            request.sent.copy_(request.tensor)
    elif isinstance(request, commhooks.AllGather):
        request.output.view(-1, request.input.numel()).copy_(request.input.view(1, -1))
    elif isinstance(request, commhooks.AllToAll):
        request.output.copy_(request.input)
    else:
        request.output.copy_(request.input[: request.output.numel()])


def attaching(processes: Sequence[int], sizes: Sizes) -> str:
    """Return milliseconds of ``attach`` with and without the comparison of all ranks."""
    rows = []
    for world in processes:
        found = spawn(_attaching, world, sizes, timeout=300)
        rows.append([str(world), f"{max(one for one, _ in found):.0f}", f"{max(one for _, one in found):.0f}"])
    return _table(["ranks", "with agreement", "without"], rows)


def _attaching(rank: int, world: int, sizes: Sizes) -> tuple[float, float]:
    given = random_gradients(gpt_shapes(*sizes), torch.float32, torch.device("cpu"))
    model = DistributedDataParallel(ShapesOnly(given))
    found = []
    for verify in (True, True, False):  # the first call pays for the imports
        dist.barrier()
        begun = time.perf_counter()
        handle = commhooks.attach(model, "powersgd(rank=4)", verify_ranks=verify)
        found.append(1e3 * (time.perf_counter() - begun))
        handle.detach()
    return found[1], found[2]


def tables(*, small: bool, largest: bool) -> str:
    """Return all tables as Markdown."""
    gpt = GPTS[1 if small else 11]
    hooks, steps = (HOOKS[:1], 3) if small else (HOOKS, 20)
    millions = (1,) if small else (*(m for m in GPTS if m < 300), *((300,) if largest else ()))
    processes = PROCESSES[:1] if small else PROCESSES
    parts: list[tuple[str, Callable[[], str]]] = [
        ("ms of a step, by parameters (two ranks, one bucket)", lambda: against_parameters(hooks, millions, steps)),
        ("ms of a step, by buckets", lambda: against_buckets(hooks, BUCKETS[:2] if small else BUCKETS, gpt, steps)),
        ("ms of a step, by processes", lambda: against_processes(hooks, processes, gpt, steps)),
        ("ms of planning, by ranks", lambda: planning([*HOOKS, *GATHERING], WORLDS[: 3 if small else None], gpt)),
        ("ms of a rank's own work, 1 M parameters", lambda: own_work(HOOKS, WORLDS, 1 << (12 if small else 20))),
        ("ms of attach, by processes", lambda: attaching(processes, gpt)),
    ]
    return "\n\n".join(f"### {title}\n\n{make()}" for title, make in parts)


def main(argv: list[str] | None = None) -> None:
    """Measure, print, and write the record if requested."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="tiny shapes, few steps")
    parser.add_argument("--largest", action="store_true", help="300 M parameters, too")
    parser.add_argument("--record", action="store_true", help="write the tables to docs/measured/scale.md")
    chosen = parser.parse_args(argv)
    found = tables(small=chosen.small, largest=chosen.largest)
    if chosen.record:
        made_by = command("ch_bench.cost.scale", argv, environment="OMP_NUM_THREADS=1")
        write("scale", "Measured on processes", made_by, found)


if __name__ == "__main__":
    run_main(main)
