"""Training with ``two_level`` compared with the flat hook at equal steps, on simulated nodes.

    python -m programs.convergence.levels [--nodes 2x4] [--steps 200] [--seeds 3] [--record]

A small GPT learns the text of Python's documentation (task ``gpt_cosine`` of the convergence study) on simulated ranks. A seed
decides weights and batches, and flat hook and ``two_level`` see the same. The *spread* is the largest minus the smallest final
held-out loss of the flat hook over the seeds. The difference of the means must not exceed it. It is printed with its standard
error over the seeds.

Every finished run is kept in ``OUT/levels.json``, so that another start continues. Simulated ranks are deterministic.
"""

import argparse
import multiprocessing
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch

import commhooks
from ch_bench import record
from programs.convergence.runs import train
from programs.convergence.tasks import SETTINGS

HOOKS = ["quant4", "quant4(error_feedback=True)", "powersgd(rank=4)"]


def forms(hook: str, each: int) -> tuple[str, str]:
    """Return the flat hook and its form on nodes of ``each`` ranks.

    >>> forms("quant4", 4)
    ('quant4', 'two_level(quant4, nodes=4)')
    """
    return hook, f"two_level({hook}, nodes={each})"


def key(expr: str, seed: int, ranks: int, steps: int) -> str:
    """Return the key of a finished run."""
    return f"{ranks} ranks/{steps} steps/{seed}/{expr}"


def run(expr: str, seed: int, ranks: int, steps: int) -> dict[str, Any]:
    """Train once. Return the curves of :func:`.runs.train`."""
    torch.set_num_threads(1)
    return train(replace(SETTINGS["gpt_cosine"], ranks=ranks, steps=steps), expr, "iid", seed)


def run_until(end: float, expr: str, seed: int, ranks: int, steps: int) -> dict[str, Any] | None:
    """Train once, or return ``None`` if it is later than ``end`` of :func:`time.monotonic`."""
    return run(expr, seed, ranks, steps) if time.monotonic() < end else None


def table(found: Mapping[str, Any], hooks: Sequence[str], seeds: int, count: int, each: int, steps: int) -> str:
    """Return the final losses as Markdown, for hooks and seeds of which both forms have finished."""
    rows = []
    for hook in hooks:
        names = [[key(expr, seed, count * each, steps) for expr in forms(hook, each)] for seed in range(seeds)]
        pairs = [[found[name] for name in pair] for pair in names if all(name in found for name in pair)]
        if len(pairs) < 2:
            continue
        for figure in ("test", "train"):
            flat, two = ([one[i][figure][-1] for one in pairs] for i in (0, 1))
            differences = [b - a for a, b in zip(flat, two, strict=True)]
            more, spread = mean(differences), max(flat) - min(flat)
            error = stdev(differences) / len(differences) ** 0.5
            inside = "within" if abs(more) <= spread else "OUTSIDE"
            rows.append(
                [
                    f"`{hook}`",
                    "held-out" if figure == "test" else "training",
                    " ".join(f"{one:.4f}" for one in flat),
                    " ".join(f"{one:.4f}" for one in two),
                    " ".join(f"{one:+.4f}" for one in differences),
                    f"{more:+.4f}",
                    f"{error:.4f}",
                    f"{spread:.4f}",
                    inside,
                ]
            )
    heads = [
        "hook",
        "loss",
        "flat, by seed",
        "two levels, by seed",
        "difference, by seed",
        "mean",
        "standard error",
        "spread of flat",
        "",
    ]
    return record.markdown_table(heads, rows)


def main(argv: list[str] | None = None) -> int:
    """Run what is missing, and print the table. Return 3 if runs are still missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", default="2x4", metavar="NxL", help="nodes and ranks of each (default 2x4)")
    parser.add_argument("--hooks", nargs="+", default=HOOKS, metavar="EXPR", help="flat hooks")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--minutes", type=float, default=1e9, help="start no run after so many minutes")
    parser.add_argument("--out", type=Path, default=Path("out/levels"), help="folder for finished runs")
    parser.add_argument("--record", action="store_true", help="write the table to docs/measured/two-level.md")
    args = parser.parse_args(argv)
    count, each = map(int, args.nodes.split("x"))
    ranks, end = count * each, time.monotonic() + 60 * args.minutes
    finished = record.FinishedRuns(args.out / "levels.json")
    todo = [(expr, seed) for seed in range(args.seeds) for hook in args.hooks for expr in forms(hook, each)]
    for expr, _ in todo:
        commhooks.create(expr)
    missing = [(expr, seed) for expr, seed in todo if key(expr, seed, ranks, args.steps) not in finished.runs]
    with ProcessPoolExecutor(args.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        runs = {key(expr, seed, ranks, args.steps): (expr, seed) for expr, seed in missing}
        ran = {pool.submit(run_until, end, *runs[name], ranks, args.steps): name for name in runs}
        for future in as_completed(ran):
            made = future.result()
            if made is not None:
                finished.put(ran[future], made)
                print(f"{ran[future]}: {made['test'][-1]:.4f} in {made['seconds']:.0f} s", file=sys.stderr, flush=True)
    shown = table(finished.runs, args.hooks, args.seeds, count, each, args.steps)
    print(shown)
    if args.record:
        title = f"Training, {args.nodes}"
        path = record.write("two-level", title, record.command("programs.convergence.levels", argv), shown)
        path.with_name("two-level-training.json").write_text(record.json_lines(finished.runs))
    return 0 if all(key(expr, seed, ranks, args.steps) in finished.runs for expr, seed in todo) else 3


if __name__ == "__main__":
    record.run_main(main)
