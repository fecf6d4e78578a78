"""How every hook trains, beside a bf16 all-reduce, at equal steps and at equal bytes; and what a residual does.

    python -m ch_bench.convergence.convergence [--tasks cnn gpt mlp] [--seeds 3] [--jobs N] [--minutes M] [--record]

Real data (`study_tasks.py`), four simulated ranks, every gradient reduction that discovery finds. Each finished run is
kept in OUT/results.json: a run that was killed, or stopped by ``--minutes``, goes on where it was.

**Equal steps.** The figures after the last step, minus those of ``bf16_compress`` with the same seed.

**Equal bytes.** The budget of a hook is what one rank has sent (``wire_bytes``) when the thriftier of the two runs, the
hook's and the baseline's of the same seed, is at its end. Each is read where its own count reaches the budget, on the
straight line between the two nearest measurements. So a compressor is judged at its end against the baseline at the
step where that has sent as much; and a hook that sends more than the baseline is cut off early.

A cell is **worse** (better) if the hook is worse (better) with every seed, and mixed otherwise; by chance alone, a
quarter of all cells of three seeds would not be mixed. Learning rates were tuned on the baseline alone (``--tune``).

The last part trains an MLP for long on class-sorted shards: PowerSGD with its residual local, and averaged as PyTorch's
has it, on a bf16 wire, and PyTorch's own hook under its bf16 wrapper on four gloo processes.
"""

import argparse
import multiprocessing
import os
import sys
import time
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

from rich.console import Console

import commhooks
from ch_bench import bench_report
from ch_bench.convergence import study_plot, study_report
from ch_bench.convergence.study_cells import BASELINE, PANELS, RESIDUAL, Cache, Cell, cells
from ch_bench.convergence.study_tasks import SETTINGS

RATES = {"cnn": (0.02, 0.05, 0.1, 0.2), "gpt": (1e-3, 3e-3, 6e-3, 1e-2)}


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--tasks", nargs="+", default=list(SETTINGS), choices=list(SETTINGS))
    parser.add_argument("--hooks", nargs="+", metavar="EXPR", help="only these expressions, and the baseline")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, help="steps of every run, to try the study out")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="runs at a time")
    parser.add_argument("--minutes", type=float, help="begin no run after this; the next call goes on")
    parser.add_argument("--out", type=Path, default=Path("out/convergence"), help="folder of results, tables, plots")
    parser.add_argument("--tune", action="store_true", help="instead: the baseline, seed 0, at several learning rates")
    parser.add_argument("--record", action="store_true", help="keep it all as docs/measured/convergence-DATE.*")
    args = parser.parse_args(argv)
    if args.seeds < 1 or args.jobs < 1 or (args.steps is not None and args.steps < 1):
        parser.error("legal are --seeds >= 1, --jobs >= 1, --steps >= 1")
    if args.hooks:
        try:
            args.hooks = list(dict.fromkeys([BASELINE, *map(_normal, args.hooks)]))
        except commhooks.CommHooksError as error:
            parser.error(str(error))
    return args


def _normal(expr: str) -> str:
    """As the study's own are written, by which cells are kept."""
    return expr if expr in RESIDUAL.values() else commhooks.create(expr).expr


def main(argv: list[str] | None = None) -> int:
    """Run what is missing and report; exit code 3 if cells are still missing."""
    args = parse(argv)
    console = Console(record=True, width=None if sys.stdout.isatty() else 130)
    if args.tune:
        return tune(args, console)
    wanted = cells(args.tasks, args.hooks, args.seeds, args.steps)
    cache = Cache(args.out / "results.json")
    left = compute(wanted, cache, args, console)
    if left:
        console.print(f"{left} of {len(wanted)} runs are still to be made: the same command goes on")
        return 3
    results = {cell: record for cell in wanted if (record := cache.get(cell)) is not None}
    report = study_report.Report(results)
    report.show(console)
    name = f"convergence-{date.today().isoformat()}" if args.record else "convergence"
    folder = bench_report.MEASURED if args.record else args.out
    pictures = study_plot.draw(report, folder, name)
    command = bench_report.command("ch_bench.convergence.convergence", argv)
    (folder / f"{name}.md").write_text(report.markdown(command, name, pictures))
    if args.record:
        cache.extract(folder / f"{name}.json", wanted)
    console.print(f"written: {folder.name}/{name}.md, .json, {', '.join(p.name for p in pictures)}")
    return 0


def compute(wanted: list[Cell], cache: Cache, args: argparse.Namespace, console: Console) -> int:
    """Make the runs that the cache does not have; returns how many are left."""
    deadline = time.monotonic() + 60 * args.minutes if args.minutes else float("inf")
    missing = [cell for cell in wanted if cache.get(cell) is None]
    total = len(missing)
    todo, alone = [c for c in missing if not c.alone], [c for c in missing if c.alone]

    def done(cell: Cell, record: dict[str, Any]) -> None:
        nonlocal total
        cache.put(cell, record)
        total -= 1
        console.print(f"{total:4} left  {record['seconds']:6.1f} s  {cell.key}", highlight=False)

    with ProcessPoolExecutor(args.jobs, multiprocessing.get_context("spawn")) as pool:
        running: dict[Future[dict[str, Any]], Cell] = {}
        while running or (todo and time.monotonic() < deadline):
            while todo and len(running) < args.jobs and time.monotonic() < deadline:
                cell = todo.pop(0)
                running[pool.submit(cell.run)] = cell
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                done(running.pop(future), future.result())
    for cell in alone:  # as many processes as ranks: nothing beside them
        if time.monotonic() < deadline:
            done(cell, cell.run())
    return total


def tune(args: argparse.Namespace, console: Console) -> int:
    """Print the baseline's figures at several learning rates: how the rates of `SETTINGS` were chosen."""
    for task, kind in PANELS:
        for lr in RATES[task] if task in args.tasks and kind == "iid" else ():
            setting = replace(SETTINGS[task], lr=lr, steps=args.steps or SETTINGS[task].steps)
            record = Cell(setting, kind, 0, BASELINE).run()
            console.print(f"{task} lr {lr:g}: train {record['train'][-1]:.4f}, held out {record['test'][-1]:.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
