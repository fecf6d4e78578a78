"""What outer optimizers cost in loss, at equal tokens, against the bytes that they send.

    python -m ch_bench.outer.quality [--size pilot|small|long|full] [--seeds 3] [--minutes M] [--record]

Four workers train the GPT on real text, once with the exact mean of the gradients at every step, and once per outer method:
H, outer rate and momentum, exchange. Workers are simulated ranks in one process: nothing is timed. Every finished run is in a
JSON file at once, and is not run again; `--minutes` stops between runs. The table has all runs that are there; ``*`` marks
the Pareto front: nothing else sent fewer bytes and lost less.
"""

import argparse
import json
import multiprocessing
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from ch_bench.bench_report import command, heading
from ch_bench.checkout import docs
from ch_bench.outer import quality_cells
from ch_bench.outer.quality_cells import Cell

Record = dict[str, Any]
COLOURS = ("#000000", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9")  # told apart also by who sees few colours


class Cache:
    """Finished runs in a JSON file, written anew after each.

    Args:
        path: the file; it need not exist.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.records: dict[str, Record] = json.loads(path.read_text()) if path.exists() else {}

    def put(self, cell: Cell, record: Record) -> None:
        """Keep a run, also if the program is killed right after."""
        self.records[cell.key] = record
        self.path.parent.mkdir(parents=True, exist_ok=True)
        beside = self.path.with_suffix(".new")
        lines = ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in self.records.items())
        beside.write_text("{\n" + lines + "\n}\n")
        beside.replace(self.path)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description="Loss of outer optimizers at equal tokens, against bytes sent.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--size", choices=list(quality_cells.SIZES), default="small", help="model and steps")
    parser.add_argument("--steps", type=int, help="in place of the size's own")
    parser.add_argument("--seeds", type=int, default=3, help="seeds of weights and data")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="only methods of these names, and all-reduce")
    parser.add_argument("--minutes", type=float, default=1e9, help="start no run after these")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, each in a process of its own")
    parser.add_argument("--out", type=Path, default=Path("quality-out"), help="folder for quality.json and the table")
    parser.add_argument("--record", action="store_true", help="keep the table, plot and runs under docs/measured")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Run what is missing, and show the table."""
    args = parse(argv)
    wanted = quality_cells.cells(args.size, args.seeds, args.steps)
    if args.only:
        wanted = [cell for cell in wanted if not cell.method.every or cell.method.label in args.only]
    cache = Cache(args.out / "quality.json")
    missing = [cell for cell in wanted if cell.key not in cache.records]
    until = time.monotonic() + 60 * args.minutes
    context = multiprocessing.get_context("spawn")
    for first in range(0, len(missing), args.jobs):
        if time.monotonic() > until:
            break
        batch = missing[first : first + args.jobs]
        with context.Pool(len(batch)) as pool:  # processes of their own: what one leaves in memory no other pays for
            for cell, made in zip(batch, pool.imap(Cell.run, batch), strict=True):
                cache.put(cell, made)
                print(f"{cell.key}: {made['held_out'][-1][1]:.4f} in {made['seconds']:.0f} s", flush=True)
    found = [cache.records[cell.key] for cell in wanted if cell.key in cache.records]
    if not found:
        print("no run is finished")
        return 0
    text = table(found, quality_cells.parameters(wanted[0].size))
    left = len(wanted) - len(found)
    print(text, f"{len(found)} runs, {left} missing" if left else "all runs are there", sep="\n\n")
    if args.record:
        record(text, found, left, sys.argv[1:] if argv is None else argv)
    return 0


def rows(found: Iterable[Record]) -> list[dict[str, Any]]:
    """A row per method: its mean over the seeds, its bytes, whether it is on the Pareto front; the baseline first."""
    by_label: dict[str, list[Record]] = {}
    for one in found:
        by_label.setdefault(one["label"], []).append(one)
    made = []
    for label, runs in by_label.items():
        losses = [run["held_out"][-1][1] for run in runs]
        made.append(
            {
                "label": label,
                "every": runs[0]["method"]["every"],
                "seeds": len(runs),
                "loss": mean(losses),
                "spread": stdev(losses) if len(losses) > 1 else 0.0,
                "sent": mean(run["wire_bytes"] for run in runs),
            }
        )
    for row in made:
        row["front"] = not any(
            other["sent"] <= row["sent"] and other["loss"] <= row["loss"] and other is not row for other in made
        )
    return sorted(made, key=lambda row: (row["every"] > 0, -row["sent"], row["loss"]))


def table(found: list[Record], numel: int) -> str:
    """The runs as a markdown table."""
    size = found[0]["size"]
    bf16 = 2 * (size["workers"] - 1) / size["workers"] * 2.0 * numel * size["steps"]
    made = rows(found)
    base = next((row["loss"] for row in made if not row["every"]), None)
    lines = [
        f"{size['workers']} workers, {numel} parameters, {size['steps']} steps of {size['batch']} x {size['context']} "
        "characters each; held-out loss in nats; bytes sent by one rank against a bf16 all-reduce at every step",
        "",
        "| method | seeds | held-out | against all-reduce | × fewer bytes than bf16 per step | front |",
        "|---|--:|--:|--:|--:|:-:|",
    ]
    for row in made:
        against = f"{100 * (row['loss'] / base - 1):+.2f} %" if base else ""
        lines.append(
            f"| {row['label']} | {row['seeds']} | {row['loss']:.4f} ± {row['spread']:.4f} | {against} | "
            f"{bf16 / row['sent']:.1f} | {'*' if row['front'] else ''} |"
        )
    return "\n".join(lines)


def draw(found: list[Record], numel: int, path: Path) -> None:
    """Held-out loss against bytes, a point per method, the Pareto front joined."""
    made = rows(found)
    with matplotlib.rc_context({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(8, 5), layout="constrained")
        axes = figure.subplots()
        for number, every in enumerate(sorted({row["every"] for row in made})):
            colour = COLOURS[number % len(COLOURS)]
            chosen = [row for row in made if row["every"] == every]
            label = f"H = {every}" if every else "all-reduce at every step"
            axes.plot([r["sent"] / 1e6 for r in chosen], [r["loss"] for r in chosen], "o", color=colour, label=label)
        front = sorted((row["sent"] / 1e6, row["loss"]) for row in made if row["front"])
        axes.plot([x for x, _ in front], [y for _, y in front], color="#999999", linewidth=1.0, label="Pareto front")
        axes.set(xscale="log", xlabel="MB sent by one rank", ylabel="held-out loss, nats")
        axes.legend(frameon=False)
        figure.savefig(path, dpi=110)


def record(text: str, found: list[Record], left: int, words: list[str]) -> None:
    """Keep table, plot and runs under docs/measured."""
    size = quality_cells.Size(**found[0]["size"])
    name = f"outer-quality-{time.strftime('%Y-%m-%d')}"
    folder = docs() / "measured"
    draw(found, quality_cells.parameters(size), folder / f"{name}.png")
    (folder / f"{name}.json").write_text(json.dumps(found, indent=0) + "\n")
    notes = [f"{left} runs of the command were not finished"] if left else []
    about = heading(name, command("ch_bench.outer.quality", words), *notes, f"raw records: {name}.json")
    (folder / f"{name}.md").write_text(f"{about}\n<!-- tables -->\n\n{text}\n\n![{name}]({name}.png)\n")
    print(f"recorded: docs/measured/{name}.md")


if __name__ == "__main__":
    sys.exit(main())
