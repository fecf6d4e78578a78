"""The two pictures of the convergence study."""

from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from ch_bench.convergence.study_cells import BASELINE, POWERSGD
from ch_bench.convergence.study_report import NAMES, SHARDS, Report, Row
from ch_bench.convergence.study_tasks import TASKS

# Okabe and Ito's colours, which the colour-blind can tell apart.
LINES = {
    BASELINE: ("#000000", "-"),
    "allreduce": ("#999999", "--"),
    "quant8(error_feedback=True)": ("#0072b2", "-"),
    "quantize_per_tensor": ("#56b4e9", "--"),
    "powersgd(rank=1)": ("#e69f00", "-"),
    POWERSGD: ("#d55e00", "-"),
    f"bf16_wrapper({POWERSGD})": ("#cc79a7", "--"),
    f"warmup({POWERSGD}, steps=20)": ("#009e73", "-"),
}
RESIDUAL = (("#000000", "-"), ("#0072b2", "-"), ("#e69f00", "--"), ("#d55e00", "-"), ("#cc79a7", "-"))
STYLE = {"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}


def draw(report: Report, folder: Path, name: str) -> list[Path]:
    """Write the pictures that there are runs for, and return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    with matplotlib.rc_context(STYLE):
        for suffix, wanted, make in (("", report.panels, _hooks), ("-residual", report.residual, _residual)):
            if wanted:
                made.append(folder / f"{name}{suffix}.png")
                make(report).savefig(made[-1], dpi=110)
    return made


def _hooks(report: Report) -> Figure:
    """Above, training loss against bytes sent; below, every hook's held-out figure less the baseline's, seed by seed."""
    columns = len(report.panels)
    rows = max(len(rows) for rows in report.panels.values())
    wide = max(9.0, 1.5 + 4.6 * columns)  # the longest expressions have their place beside one panel, too
    figure = Figure(figsize=(wide, 5.2 + 0.26 * rows), layout="constrained")
    grid = figure.subplots(2, columns, squeeze=False, height_ratios=[4.0, 0.8 + 0.26 * rows])
    for column, (panel, found) in enumerate(report.panels.items()):
        _against_bytes(grid[0][column], report, panel)
        _differences(grid[1][column], panel, found, labels=column == 0)
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=4 if wide > 12 else 2, frameon=False)
    return figure


def _lines(report: Report) -> dict[str, tuple[str, str]]:
    """What is drawn: of :data:`LINES` what was run, and in the styles that are left what else was."""
    run = dict.fromkeys(row.expr for rows in report.panels.values() for row in rows)
    known = {expr: style for expr, style in LINES.items() if expr in run}
    free = [style for style in LINES.values() if style not in known.values()]
    return known | dict(zip((expr for expr in run if expr not in known), free, strict=False))


def _against_bytes(axes: Axes, report: Report, panel: tuple[str, str]) -> None:
    for expr, (colour, dash) in _lines(report).items():
        runs = report.runs.get((*panel, expr), [])
        for run in runs:
            sent = [wire / 1e6 for wire in run["wire"]]
            label = expr if run is runs[0] else None
            axes.plot(sent[1:], run["train"][1:], color=colour, linestyle=dash, lw=1.3, alpha=0.8, label=label)
    axes.set(xscale="log", yscale="log", xlabel="MB sent by one rank", title=f"{NAMES[panel[0]]}, {SHARDS[panel[1]]}")
    axes.set_ylabel("training loss")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_major_formatter("{x:g}")
    low, high = axes.get_ylim()
    axes.yaxis.set_minor_formatter("{x:g}" if high < 10 * low else NullFormatter())
    axes.grid(color="#e4e4e4", linewidth=0.8)


def _differences(axes: Axes, panel: tuple[str, str], rows: list[Row], labels: bool) -> None:
    shown = [row for row in rows if row.expr != BASELINE]
    higher = TASKS[panel[0]].higher
    for y, row in enumerate(shown):
        c = row.steps["test"]
        gaps = [a - b for a, b in zip(c.ours, c.base, strict=True)]
        colour = {"worse": "#d55e00", "better": "#009e73"}.get(c.verdict, "#555555")
        axes.plot(gaps, [y] * len(gaps), "o", color=colour, markersize=4, alpha=0.8)
        axes.plot([sum(gaps) / len(gaps)], [y], "|", color=colour, markersize=13)
    axes.axvline(0.0, color="#000000", linewidth=0.8)
    axes.set_yticks(range(len(shown)), [row.expr for row in shown] if labels else [], fontsize=8)
    axes.set_ylim(len(shown) - 0.5, -0.5)
    what = TASKS[panel[0]].held_out
    axes.set_xlabel(
        f"{what}, minus {BASELINE}'s, equal steps\n({'right' if higher else 'left'} is better; • a seed, | mean)"
    )
    axes.grid(color="#eeeeee", linewidth=0.8)


def _residual(report: Report) -> Figure:
    """Norm of the residual, and training loss, against steps."""
    figure = Figure(figsize=(12, 4.8), layout="constrained")
    norm, loss = figure.subplots(1, 2)
    for (label, runs), (colour, dash) in zip(report.residual.items(), RESIDUAL, strict=False):
        for run in runs:
            style: dict[str, Any] = {"color": colour, "linestyle": dash, "lw": 1.3, "alpha": 0.8}
            style["label"] = label if run is runs[0] else None
            if any(run["residual"]):
                norm.plot(run["step"][1:], run["residual"][1:], **style)
            loss.plot(run["step"][1:], run["train"][1:], **style)
    for axes, title in ((norm, "Norm of the residual, mean over the ranks"), (loss, "Training loss")):
        axes.set(xlabel="steps", yscale="log")
        axes.set_title(title, loc="left", fontweight="bold")
        axes.grid(color="#e4e4e4", linewidth=0.8)
    loss.legend(frameon=False, fontsize=9)
    figure.suptitle(f"PowerSGD, rank 2: {report.titles('mlp', 'sorted')}")
    return figure
