"""Training with every hook compared with a bf16 all-reduce, at equal steps and at equal bytes.

    python -m programs.convergence [--tasks cnn gpt gpt_cosine] [--seeds 3] [--jobs N] [--minutes M] [--record]

The study trains on real data (`tasks.py`) with four simulated ranks and every installed gradient reduction. Each finished run
is kept in OUT/results.json; a study that was interrupted continues from there.

**Equal steps.** Figures after the last step, minus those of ``bf16_compress`` with the same seed.

**Equal bytes.** The budget of a hook is the number of bytes that one rank has sent (``wire_bytes``) at the end of the run that
sends less, the hook's or the baseline's. Both figures are read at the budget, interpolated between measurements. A compressor
is thus judged at its end against the baseline at the step that had sent as much. A hook that sends more is cut off early.

A cell is **worse** (better) if the hook is worse (better) with every seed, and mixed otherwise. By chance alone, a quarter of
all cells of three seeds would not be mixed. Learning rates were tuned on the baseline only.
"""

import argparse
import multiprocessing
import os
import sys
import time
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from datetime import date
from pathlib import Path
from typing import Any

from rich.console import Console

import commhooks
from ch_bench import record
from programs.convergence.report import Report, draw
from programs.convergence.runs import BASELINE, TrainingRun, runs
from programs.convergence.tasks import SETTINGS

TITLE = "Training with every hook"


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m programs.convergence",
        description=__doc__.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--tasks", nargs="+", default=list(SETTINGS), choices=list(SETTINGS))
    parser.add_argument("--hooks", nargs="+", metavar="EXPR", help="only these expressions, and the baseline")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, help="steps of every run, for a short trial")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="runs at a time")
    parser.add_argument("--minutes", type=float, help="start no run after this time")
    parser.add_argument("--out", type=Path, default=Path("out/convergence"), help="folder of results, tables, plots")
    parser.add_argument("--record", action="store_true", help="write everything to docs/measured/convergence.*")
    args = parser.parse_args(argv)
    if args.seeds < 1 or args.jobs < 1 or (args.steps is not None and args.steps < 1):
        parser.error("--seeds, --jobs and --steps must be at least 1")
    if args.hooks:
        try:
            args.hooks = list(dict.fromkeys([BASELINE, *(commhooks.create(expr).expr for expr in args.hooks)]))
        except commhooks.CommHooksError as error:
            parser.error(str(error))
    return args


def main(argv: list[str] | None = None) -> int:
    """Run the missing runs and report. Return 3 if runs are still missing."""
    args = parse(argv)
    console = Console(record=True, width=None if sys.stdout.isatty() else 130)
    wanted = runs(args.tasks, args.hooks, args.seeds, args.steps)
    finished = record.FinishedRuns(args.out / "results.json")
    left = compute(wanted, finished, args, console)
    if left:
        console.print(f"{left} of {len(wanted)} runs are missing: the same command continues")
        return 3
    report = Report({one: finished.runs[one.key]["record"] for one in wanted})
    report.show(console)
    folder = record.measured() if args.record else args.out
    picture = draw(report, folder / "convergence.png")
    minutes = f"sum of the runs' times: {report.seconds / 60:.1f} minutes, --jobs at a time"
    notes = [f"date: {date.today().isoformat()}", minutes, "raw records: convergence.json"]
    head = [f"    {record.command('programs.convergence', argv)}", ""]
    head += [f"- {item}" for item in (*(f"{key}: {value}" for key, value in record.machine().items()), *notes)]
    page = folder / "convergence.md"
    old = page.read_text() if args.record and page.exists() else f"# {TITLE}\n"
    body = "\n".join([*head, "", report.markdown(picture)])
    page.write_text(record.replace_section(old, TITLE, body.rstrip("\n")))
    if args.record:
        (folder / "convergence.json").write_text(record.json_lines({one.key: finished.runs[one.key] for one in wanted}))
    console.print(f"written: {folder.name}/convergence.md, {picture.name}")
    return 0


def _is_finished(one: TrainingRun, finished: record.FinishedRuns) -> bool:
    """Return True if the run is finished and was made with the same setting."""
    found = finished.runs.get(one.key)
    return found is not None and found["setting"] == one.setting.as_dict()


def compute(
    wanted: list[TrainingRun], finished: record.FinishedRuns, args: argparse.Namespace, console: Console
) -> int:
    """Run the missing runs and return the number of those still missing."""
    deadline = time.monotonic() + 60 * args.minutes if args.minutes else float("inf")
    todo = [one for one in wanted if not _is_finished(one, finished)]
    missing = len(todo)

    def done(one: TrainingRun, made: dict[str, Any]) -> None:
        nonlocal missing
        finished.put(one.key, {"setting": one.setting.as_dict(), "record": made})
        missing -= 1
        console.print(f"{missing:4} left  {made['seconds']:6.1f} s  {one.key}", highlight=False)

    with ProcessPoolExecutor(args.jobs, multiprocessing.get_context("spawn")) as pool:
        running: dict[Future[dict[str, Any]], TrainingRun] = {}
        while running or (todo and time.monotonic() < deadline):
            while todo and len(running) < args.jobs and time.monotonic() < deadline:
                one = todo.pop(0)
                running[pool.submit(one.run)] = one
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                done(running.pop(future), future.result())
    return missing


if __name__ == "__main__":
    record.run_main(main)
