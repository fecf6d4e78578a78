"""What each framework's adapter adds to a step, beside a manual attach under the same framework.

    python -m ch_bench.cost.adapters [--only fabric] [--hook EXPR] [--blocks 20] [--steps 24] [--record [NAME]]

Two ranks train a GPT of 1.8 M parameters under the framework, block by block in an order drawn anew: with its adapter, and
with `commhooks.attach` called on what the framework has wrapped. Every block makes its model and its wrapper anew, so that
no placement in memory favours one of them. A step is from one forward to the next, all that the framework does included.
Compared is the CPU time of rank 0's process, its gloo threads included, and beside it the wall time, by the median step of
a block, with a bootstrap interval over pairs of blocks. In a last pair calls of Python functions are counted, which no load of
the machine changes. The claim is at most 1 % of CPU time. A framework
that is not installed is left out.
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from rich.console import Console

from ch_bench import bench_report

LIMIT = 0.01
NEEDS = {
    "lightning": "lightning",
    "fabric": "lightning",
    "accelerate": "accelerate",
    "transformers": "transformers",
    "titan": "torchtitan",
    "ray": "ray",
}


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Time what the adapters of frameworks add to a step.")
    parser.add_argument("--only", choices=list(NEEDS), help="one framework")
    parser.add_argument("--hook", default="powersgd(rank=4)")
    parser.add_argument("--blocks", type=int, default=20)
    parser.add_argument("--steps", type=int, default=24, help="of a block, the first few not counted")
    parser.add_argument("--record", nargs="?", const="adapters", metavar="NAME", help="keep it in docs/measured")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Print a row for each framework; 1 if one adds more than the limit for certain."""
    args = parse(argv)
    console = Console(record=True, width=None if sys.stdout.isatty() else 120)
    console.print(
        f"{args.hook}, 2 ranks, {args.blocks} pairs of blocks of {args.steps} steps; load before {os.getloadavg()[0]:.1f}"
    )
    console.print(
        f"{'adapter':<13} {'CPU a step':>10}  {'adds':>7}  {'95 %':<19}  {'wall adds':>9}  {'95 %':<19}  {'calls':>5}  adds"
    )
    certain = False
    for name, package in NEEDS.items():
        if args.only not in (None, name):
            continue
        if importlib.util.find_spec(package) is None:
            console.print(f"{name:<13} not installed")
            continue
        *pairs, counted = _measure(name, args.hook, args.blocks, args.steps)
        cells = [f"{name:<13} {1e3 * median(median(by_hand[0]) for by_hand, _ in pairs):>7.2f} ms"]
        for kind in (0, 1):
            ratios = [median(adapter[kind]) / median(by_hand[kind]) - 1 for by_hand, adapter in pairs]
            middle, low, high = bench_report.interval(ratios)
            certain = certain or (kind == 0 and low > LIMIT)
            cells.append(f"{middle:>+7.2%}  {f'{low:+.2%} … {high:+.2%}':<19}")
        calls = [median(each[2]) for each in counted]
        cells.append(f"{calls[0]:>5.0f}  {calls[1] - calls[0]:>+4.0f}")
        console.print("  ".join(cells), highlight=False)
    if args.record:
        command = bench_report.command("ch_bench.cost.adapters", argv)
        console.print(f"recorded: {bench_report.record(args.record, command, console)}")
    return int(certain)


def _measure(name: str, hook: str, blocks: int, steps: int) -> list[list[list[list[float]]]]:
    """Of each pair of blocks, by hand and by the adapter, CPU and wall seconds and calls of rank 0's steps."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "steps.json")
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        program = ["-m", "ch_bench.cost.adapters_rank", name, hook, str(blocks), str(steps), str(out)]
        command = [sys.executable, "-W", "ignore", *([] if name == "ray" else torchrun), *program]
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        if done.returncode:
            raise RuntimeError(done.stderr)
        found: list[list[list[list[float]]]] = json.loads(out.read_text())
        return found


if __name__ == "__main__":
    sys.exit(main())
