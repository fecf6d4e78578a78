"""The race's tables and plots."""

import json
import time
from pathlib import Path
from statistics import mean
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from ch_bench.bench_report import command, heading
from ch_bench.checkout import docs
from ch_bench.outer.race_methods import REFERENCE

Record = dict[str, Any]


def line(record: Record) -> str:
    """A finished method in one line."""
    head = f"{record['link']}, seed {record['seed']}, {record['label']}"
    steps, seconds, sent, _ = record["rows"][-1]
    verb = "" if record["arrived"] else "did not arrive, "
    alone = f"{1000 * record['local_step_seconds']:.1f} ms a step alone"
    return f"{head}: {verb}{seconds:.1f} s, {steps} steps, {sent / 1e6:.1f} MB, {alone}"


def _by_label(found: list[Record], link: str) -> dict[str, list[Record]]:
    made: dict[str, list[Record]] = {}
    for one in found:
        if one["link"] == link:
            made.setdefault(one["label"], []).append(one)
    return made


def tables(found: list[Record]) -> str:
    """A markdown table per link."""
    return "\n\n".join(_table(_by_label(found, link), link) for link in dict.fromkeys(one["link"] for one in found))


def _table(runs: dict[str, list[Record]], link: str) -> str:
    if REFERENCE not in runs:
        return f"{link}: {REFERENCE} is not finished"
    per_step = mean(one["local_step_seconds"] for records in runs.values() for one in records)
    needed = mean(one["rows"][-1][0] for one in runs[REFERENCE])
    goals = ", ".join(f"{one['goal']:.4f}" for one in runs[REFERENCE])
    arrived = mean(one["verified_bits"] for one in runs[REFERENCE]) / 1e6
    lines = [
        f"**{link}** ({arrived:.0f} Mbit/s arrived in a plain transfer), goal {goals} nats, "
        f"{1000 * per_step:.1f} ms a step without communication, floor {per_step * needed:.1f} s",
        "",
        "| method | seeds | seconds | × floor | sooner than DDP | steps | MB sent | utilization |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    ddp = mean(one["rows"][-1][1] for one in runs[REFERENCE])
    body = []
    for label, records in runs.items():
        steps, seconds, sent = (mean(one["rows"][-1][i] for one in records) for i in range(3))
        more = "" if all(one["arrived"] for one in records) else "> "  # who did not arrive: a lower bound
        less = "< " if more else ""
        # Each by the steps that it took alone: the machine is not equally fast all the time.
        over = mean(one["rows"][-1][1] / (one["local_step_seconds"] * needed) for one in records)
        used = mean(one["rows"][-1][0] * one["local_step_seconds"] / one["rows"][-1][1] for one in records)
        cells = [label, str(len(records)), f"{more}{seconds:.1f}", f"{more}{over:.2f}"]
        cells += [f"{less}{ddp / seconds:.2f} ×", f"{more}{steps:.0f}", f"{more}{sent / 1e6:.1f}"]
        body.append((bool(more), seconds, [*cells, f"{100 * used:.0f} %"]))
    return "\n".join(lines + [f"| {' | '.join(cells)} |" for _, _, cells in sorted(body)])


def draw(found: list[Record], folder: Path, name: str = "race") -> list[Path]:
    """Held-out loss against seconds, a picture per link, of the first seed."""
    made = []
    for link in dict.fromkeys(one["link"] for one in found):
        runs = {label: records[0] for label, records in _by_label(found, link).items()}
        if REFERENCE not in runs:
            continue
        with matplotlib.rc_context({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}):
            figure = Figure(figsize=(9, 6.5), layout="constrained")
            axes = figure.subplots()
            steps = [row[0] for row in runs[REFERENCE]["rows"]]
            losses = [row[3] for row in runs[REFERENCE]["rows"]]
            times = [step * runs[REFERENCE]["local_step_seconds"] for step in steps]
            axes.plot(times, losses, color="#000000", linestyle="--", label="floor")
            for number, (label, one) in enumerate(sorted(runs.items(), key=lambda item: item[1]["rows"][-1:])):
                style = "-" if not label.startswith("torch") else ":"
                rows = one["rows"]
                axes.plot([r[1] for r in rows], [r[3] for r in rows], style, color=f"C{number % 10}", label=label)
            axes.axhline(runs[REFERENCE]["goal"], color="#999999", linewidth=0.8)
            axes.set(xscale="log", xlabel=f"seconds at {link}", ylabel="held-out loss, nats")
            figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=7)
            made.append(folder / f"{name}-{link}.png")
            figure.savefig(made[-1], dpi=110)
    return made


def record(found: list[Record], name: str, words: list[str]) -> None:
    """Keep the tables, plots and runs under docs/measured."""
    name += f"-{time.strftime('%Y-%m-%d')}"
    folder = docs() / "measured"
    pictures = draw(found, folder, name)
    (folder / f"{name}.json").write_text(json.dumps(found, indent=0) + "\n")
    about = heading(name, command("ch_bench.outer.race", words), f"raw records: {name}.json")
    shown = "\n\n".join(f"![{path.stem}]({path.name})" for path in pictures)
    (folder / f"{name}.md").write_text(f"{about}\n<!-- tables -->\n\n{tables(found)}\n\n{shown}\n")
    print(f"recorded: docs/measured/{name}.md")
