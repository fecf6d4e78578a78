"""What telemetry costs the host: two models with one hook, one of them recorded, step by step in turns.

    python -m ch_bench.cost.telemetry [--every 100] [--blocks 5] [--hook "powersgd(rank=4)"] [--record]

A block has `--every` steps of each model, and so one sampled step. Compared is the CPU time that the process of rank 0
spends in a step, all its threads together, and beside it the wall time; both as a share of the step that is not recorded,
with a bootstrap interval over blocks. The claim is at most 1 % of CPU time at the default sampling.
"""

import argparse
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console

import commhooks
from ch_bench import bench_report, launch
from ch_bench.advise.workload import load
from commhooks.telemetry import record

LIMIT = 0.01
WARM_UP = 3


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Measure what telemetry costs.")
    parser.add_argument("--model", default="gpt", help="module:callable, or gpt, mlp, convnet")
    parser.add_argument("--hook", default="powersgd(rank=4)")
    parser.add_argument("--every", type=int, default=100, help="steps from one sample to the next (the default's)")
    parser.add_argument("--blocks", type=int, default=5)
    parser.add_argument("--record", nargs="?", const="telemetry", metavar="NAME", help="keep it in docs/measured")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Print both intervals; 1 if the median of the CPU time's share is beyond the limit."""
    args = parse(argv)
    console = Console(record=True, width=None if sys.stdout.isatty() else 100)
    with tempfile.TemporaryDirectory(prefix="commhooks-") as folder:
        path = Path(folder, "found.json")
        launch.launch(worker, 2, vars(args), path)
        found = json.loads(path.read_text())
    console.print(f"{args.hook} on {args.model}, 2 ranks, one sample every {args.every} steps, {args.blocks} blocks")
    shares = {}
    for what in ("cpu", "wall"):
        ratios = [sum(on) / sum(off) - 1 for on, off in zip(found["on"][what], found["off"][what], strict=True)]
        middle, low, high = bench_report.interval(ratios)
        step = sum(map(sum, found["off"][what])) / sum(map(len, found["off"][what]))
        shares[what] = middle
        console.print(f"{what:<5} {step * 1e3:8.2f} ms a step, telemetry adds {middle:+.2%} ({low:+.2%} … {high:+.2%})")
    samples = found["samples"]
    console.print(f"samples written: {samples}; at most {LIMIT:.0%} of CPU time: {shares['cpu'] <= LIMIT}")
    if args.record:
        command = bench_report.command("ch_bench.cost.telemetry", argv)
        console.print(f"recorded: {bench_report.record(args.record, command, console)}")
    return int(shares["cpu"] > LIMIT)


def worker(rank: int, world: int, device: torch.device, args: dict[str, Any], path: Path) -> None:
    """One rank; rank 0 is recorded, and leaves its times."""
    works = {name: load(args["model"], device) for name in ("on", "off")}
    handles = {name: commhooks.attach(work.model, args["hook"]) for name, work in works.items()}
    for work in works.values():
        for _ in range(WARM_UP):
            work.step()
    samples: list[int] = []
    recorder = record(handles["on"], lambda step, figures: samples.append(step), every=args["every"])
    times: dict[str, dict[str, list[list[float]]]] = {name: {"cpu": [], "wall": []} for name in works}
    for block in range(args["blocks"]):
        for kinds in times.values():
            for lists in kinds.values():
                lists.append([])
        for step in range(args["every"]):
            for name in random.Random(f"{block} {step}").sample(list(works), 2):  # the same order on every rank
                dist.barrier()
                cpu, wall = time.process_time(), time.perf_counter()
                works[name].step()
                times[name]["wall"][-1].append(time.perf_counter() - wall)
                times[name]["cpu"][-1].append(time.process_time() - cpu)
    recorder.close()
    if rank == 0:
        path.write_text(json.dumps({**times, "samples": len(samples)}))


if __name__ == "__main__":
    sys.exit(main())
