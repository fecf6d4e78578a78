"""What `commhooks run` adds to a step, beside a script that attaches itself.

    python -m ch_bench.cost.launching [--hook EXPR] [--steps 400] [--record NAME]

Two ranks train two equal models (GPT, 1.8 M parameters) in turn, in an order drawn anew for each step. The script
attaches to one; `commhooks run` finds the other. Compared is the CPU time of the process, its gloo threads included, and
the wall time, by the ratio of medians over blocks of 20 steps, with a bootstrap interval over blocks.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from ch_bench import bench_report

BLOCK, WARM = 20, 20


def main(argv: list[str] | None = None) -> int:
    """Measure and report; exit code 1 if more than the limit is added to the CPU time for certain."""
    parser = argparse.ArgumentParser(description="Time what `commhooks run` adds to a step.")
    parser.add_argument("--hook", default="powersgd(rank=4)")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--limit", type=float, default=1.01, help="legal ratio of CPU times")
    parser.add_argument("--record", metavar="NAME", help="keep the output as docs/measured/NAME-DATE.md")
    args = parser.parse_args(argv)
    load = os.getloadavg()[0]
    console = Console(record=True, width=None if sys.stdout.isatty() else 100)
    by_hand, by_run = _measure(args.hook, args.steps)
    table = Table(title=f"{args.hook}, {args.steps} steps of each, 2 ranks; load before {load:.1f}", box=None)
    for column in ("a step", "attached by hand, ms", "by commhooks run, ms", "ratio", "95 %"):
        table.add_column(column, justify="left" if column == "a step" else "right")
    certain = 0.0
    for kind, name in enumerate(("CPU time", "wall time")):
        pairs = [[step[kind] for step in steps] for steps in (by_hand, by_run)]
        blocks = [[median(each[i : i + BLOCK]) for i in range(WARM, len(each), BLOCK)] for each in pairs]
        ratio, low, high = bench_report.interval([b / a for a, b in zip(*blocks, strict=True)])
        certain = certain or low
        cells = [f"{1e3 * median(each):.3f}" for each in blocks]
        table.add_row(name, *cells, f"{ratio:.4f}", f"{low:.4f} … {high:.4f}")
    console.print(table)
    if args.record:
        command = bench_report.command("ch_bench.cost.launching", argv)
        console.print(f"recorded: {bench_report.record(args.record, command, console)}")
    return int(certain > args.limit)


def _measure(hook: str, steps: int) -> list[list[list[float]]]:
    """CPU and wall seconds of every step on rank 0: attached by hand, by ``commhooks run``."""
    with tempfile.TemporaryDirectory() as folder:
        out, report = Path(folder) / "steps.json", Path(folder) / "report.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        command += ["-m", "commhooks", "run", "--hook", hook, "--module-pattern", "Unchanged", "--report", str(report)]
        command += ["-m", "ch_bench.cost.launching_rank", hook, str(steps), str(out)]
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        if done.returncode:
            raise RuntimeError(done.stderr)
        [model] = json.loads(report.read_text())["models"]
        if model["stats"]["steps"] != steps:
            raise RuntimeError(f"commhooks run served {model['stats']['steps']:.0f} of {steps} steps")
        found: list[list[list[float]]] = json.loads(out.read_text())
        return found


if __name__ == "__main__":
    sys.exit(main())
