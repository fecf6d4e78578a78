"""Report of the convergence study: comparisons with the baseline, tables and plots."""

from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter
from rich import box
from rich.console import Console
from rich.table import Table

from programs.convergence.runs import BASELINE, LEFT_OUT, PANELS, POWERSGD, Record, TrainingRun
from programs.convergence.tasks import TASKS

WORSE, BETTER, MIXED = "worse", "better", "mixed"
NAMES = {"cnn": "MNIST-5k CNN", "gpt": "text GPT", "gpt_cosine": "text GPT, AdamW and cosine"}
SHARDS = {"iid": "i.i.d. shards", "sorted": "class-sorted shards"}


def at_bytes(record: Record, budget: float, figure: str) -> float:
    """Return a figure at ``budget`` sent bytes, interpolated between measurements; beyond the last one, the last figure."""
    wire, values = record["wire"], record[figure]
    for i in range(1, len(wire)):
        if wire[i] >= budget:
            part = (budget - wire[i - 1]) / (wire[i] - wire[i - 1])
            return float(values[i - 1] + part * (values[i] - values[i - 1]))
    return float(values[-1])


def verdict(differences: list[float], higher: bool = False) -> str:
    """Return `WORSE` or `BETTER` if that is true for every seed, else `MIXED`; differences are hook minus baseline."""
    signs = {(d > 0) - (d < 0) for d in differences}
    if len(signs) > 1 or signs == {0}:
        return MIXED
    return BETTER if (signs == {1}) == higher else WORSE


@dataclass(frozen=True)
class Comparison:
    """One figure of a hook and of the baseline, one entry per seed."""

    ours: list[float]
    base: list[float]
    higher: bool

    @property
    def verdict(self) -> str:
        return verdict([a - b for a, b in zip(self.ours, self.base, strict=True)], self.higher)

    @property
    def difference(self) -> float:
        return mean(self.ours) - mean(self.base)


@dataclass(frozen=True)
class HookResult:
    """A hook in one panel (task and shards)."""

    expr: str
    megabytes: float  # sent by one rank in the whole run
    ratio: float  # the baseline's bytes divided by these
    budget: float  # megabytes at which both are compared
    steps: dict[str, Comparison]  # figure -> at equal steps
    bytes: dict[str, Comparison]  # figure -> at equal bytes


def compare(ours: list[Record], base: list[Record], expr: str, higher: bool) -> HookResult:
    """Compare a hook's runs with the baseline's, in the same order of seeds."""
    pairs = list(zip(ours, base, strict=True))
    budgets = [min(a["wire"][-1], b["wire"][-1]) for a, b in pairs]

    def end(figure: str, up: bool) -> Comparison:
        return Comparison([a[figure][-1] for a in ours], [b[figure][-1] for b in base], up)

    def equal(figure: str, up: bool) -> Comparison:
        every = [[at_bytes(r, m, figure) for r in pair] for pair, m in zip(pairs, budgets, strict=True)]
        return Comparison([a for a, _ in every], [b for _, b in every], up)

    sent = mean(a["wire"][-1] for a in ours)
    figures = {"train": False, "test": higher}
    return HookResult(
        expr,
        sent / 1e6,
        mean(b["wire"][-1] for b in base) / sent,
        mean(budgets) / 1e6,
        {name: end(name, up) for name, up in figures.items()},
        {name: equal(name, up) for name, up in figures.items()},
    )


class Report:
    """The tables of finished runs.

    Args:
        results: record of every run.
    """

    def __init__(self, results: dict[TrainingRun, Record]) -> None:
        self.runs: dict[tuple[str, str, str], list[Record]] = {}
        self.settings = {one.setting.task: one.setting for one in results}
        for one, record in sorted(results.items(), key=lambda item: item[0].seed):
            self.runs.setdefault((one.setting.task, one.kind, one.expr), []).append(record)
        self.seconds = sum(record["seconds"] for record in results.values())
        self.panels = {panel: self._rows(*panel) for panel in PANELS if (*panel, BASELINE) in self.runs}

    def _rows(self, task: str, kind: str) -> list[HookResult]:
        base = self.runs[task, kind, BASELINE]
        exprs = [expr for t, k, expr in self.runs if (t, k) == (task, kind)]
        return [compare(self.runs[task, kind, e], base, e, TASKS[task].higher) for e in exprs]

    def titles(self, task: str, kind: str) -> str:
        setting = self.settings[task]
        seeds = max(len(runs) for (t, k, _), runs in self.runs.items() if (t, k) == (task, kind))
        return (
            f"{NAMES[task]}, {SHARDS[kind]}: {setting.steps} steps, {setting.ranks} ranks of batch {setting.batch}, "
            f"{seeds} seed{'s' * (seeds > 1)}"
        )

    @staticmethod
    def headings(task: str) -> list[str]:
        held = TASKS[task].held_out
        return [
            "hook", "MB sent", "fewer", "train loss", held, "Δ train", "Δ held-out",
            "at equal bytes: MB", "train loss (bf16's)", f"{held} (bf16's)",
        ]  # fmt: skip

    @staticmethod
    def line(row: HookResult) -> list[tuple[str, str]]:
        """Return the cells of a row and the verdict on each; ``""`` if there is none."""
        cells = [(row.expr, ""), (f"{row.megabytes:.2f}", ""), (f"{row.ratio:.1f}×", "")]
        cells += [(spread(row.steps[name].ours), "") for name in ("train", "test")]
        if row.expr == BASELINE:
            return cells + [("·", "")] * 5
        cells += [(f"{row.steps[n].difference:+.3g}", row.steps[n].verdict) for n in ("train", "test")]
        cells.append((f"{row.budget:.2f}", ""))
        for c in (row.bytes["train"], row.bytes["test"]):
            cells.append((f"{mean(c.ours):.3g} ({mean(c.base):.3g})", c.verdict))
        return cells

    def losing(self) -> list[str]:
        """Return every comparison in which a hook is worse than the baseline with each seed."""
        found = []
        for (task, kind), rows in self.panels.items():
            for row in rows:
                for where, comparisons in (("steps", row.steps), ("bytes", row.bytes)):
                    lost = [
                        f"{'train loss' if name == 'train' else TASKS[task].held_out} {c.difference:+.3g}"
                        for name, c in comparisons.items()
                        if row.expr != BASELINE and c.verdict == WORSE
                    ]
                    if lost:
                        found.append(
                            f"{NAMES[task]}, {SHARDS[kind]}, `{row.expr}`, at equal {where}: {'; '.join(lost)}"
                        )
        return found

    def show(self, console: Console) -> None:
        """Print all tables and the losing hooks."""
        colour = {WORSE: "red", BETTER: "green", MIXED: "", "": ""}
        for (task, kind), rows in self.panels.items():
            table = Table(title=self.titles(task, kind), box=box.SIMPLE_HEAD)
            for i, name in enumerate(self.headings(task)):
                table.add_column(name, justify="right" if i else "left", overflow="fold", min_width=0 if i else 30)
            for row in rows:
                table.add_row(*(f"[{colour[v]}]{text}[/]" if colour[v] else text for text, v in self.line(row)))
            console.print(table)
        if self.panels:
            console.print(f"Worse than {BASELINE} with every seed:", *(f"  {x}" for x in self.losing()), sep="\n")
        console.print(f"Sum of the runs' times: {self.seconds / 60:.1f} minutes, --jobs at a time")

    def markdown(self, picture: Path) -> str:
        """Return the tables as Markdown, after a mark."""
        lines = ["<!-- tables -->", ""]
        for (task, kind), rows in self.panels.items():
            lines += [
                f"## {self.titles(task, kind)}",
                "",
                *_table(self.headings(task), [_marked(r) for r in rows]),
                "",
            ]
        if self.panels:
            lines += [f"## Worse than `{BASELINE}` with every seed", "", *(f"- {x}" for x in self.losing()), ""]
            lines += ["## Left out", "", *(f"- `{hook}`: {why}" for hook, why in LEFT_OUT.items()), ""]
        lines += [f"![{picture.stem}]({picture.name})", ""]
        return "\n".join(lines[:-1]) + "\n"


def spread(values: list[float]) -> str:
    """Return mean and standard deviation over the seeds."""
    digits = 4 if abs(mean(values)) < 10 else 2
    return f"{mean(values):.{digits}f}" + (f" ± {stdev(values):.{digits}f}" if len(values) > 1 else "")


def _marked(row: HookResult) -> list[str]:
    marks = {WORSE: "**{}** ▼", BETTER: "{} ▲", MIXED: "{}", "": "{}"}
    first, *rest = Report.line(row)
    return [f"`{first[0]}`", *(marks[v].format(text) for text, v in rest)]


def _table(heads: list[str], rows: list[list[str]]) -> list[str]:
    rule = "|---" + "|--:" * (len(heads) - 1) + "|"
    return [f"| {' | '.join(heads)} |", rule, *(f"| {' | '.join(row)} |" for row in rows)]


# -- plots, in Okabe and Ito's colours, which colour-blind readers can distinguish
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
STYLE = {"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}


def draw(report: Report, path: Path) -> Path:
    """Plot the panels that have runs and return the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(STYLE):
        _hooks(report).savefig(path, dpi=110)
    return path


def _hooks(report: Report) -> Figure:
    """Plot training loss against bytes sent, and below each hook's held-out figure minus the baseline's for each seed."""
    columns = len(report.panels)
    rows = max(len(rows) for rows in report.panels.values())
    wide = max(9.0, 1.5 + 4.6 * columns)  # room for long expressions
    figure = Figure(figsize=(wide, 5.2 + 0.26 * rows), layout="constrained")
    grid = figure.subplots(2, columns, squeeze=False, height_ratios=[4.0, 0.8 + 0.26 * rows])
    for column, (panel, found) in enumerate(report.panels.items()):
        _against_bytes(grid[0][column], report, panel)
        _differences(grid[1][column], panel, found, labels=column == 0)
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=4 if wide > 12 else 2, frameon=False)
    return figure


def _lines(report: Report) -> dict[str, tuple[str, str]]:
    """Return the style of each hook: :data:`LINES` if it is there, otherwise a free style."""
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


def _differences(axes: Axes, panel: tuple[str, str], rows: list[HookResult], labels: bool) -> None:
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
    figure = TASKS[panel[0]].held_out
    axes.set_xlabel(
        f"{figure}, minus {BASELINE}'s, equal steps\n({'right' if higher else 'left'} is better; • a seed, | mean)"
    )
    axes.grid(color="#eeeeee", linewidth=0.8)
