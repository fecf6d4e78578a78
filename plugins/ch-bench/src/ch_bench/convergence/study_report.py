"""What the convergence study says: comparisons with the baseline, tables for the screen and for a page."""

from dataclasses import dataclass
from statistics import mean, stdev
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from ch_bench.bench_report import heading
from ch_bench.convergence.study_cells import BASELINE, LEFT_OUT, PANELS, RESIDUAL, Cell
from ch_bench.convergence.study_tasks import TASKS

Record = dict[str, Any]
WORSE, BETTER, MIXED = "worse", "better", "mixed"
NAMES = {"cnn": "MNIST-5k CNN", "gpt": "text GPT", "gpt_cosine": "text GPT, AdamW and cosine", "mlp": "MNIST-5k MLP"}
SHARDS = {"iid": "i.i.d. shards", "sorted": "class-sorted shards"}


def at_bytes(record: Record, budget: float, figure: str) -> float:
    """A figure when one rank has sent ``budget`` bytes: on the line between the two nearest measurements.

    Beyond the last measurement it is the last figure.
    """
    wire, values = record["wire"], record[figure]
    for i in range(1, len(wire)):
        if wire[i] >= budget:
            part = (budget - wire[i - 1]) / (wire[i] - wire[i - 1])
            return float(values[i - 1] + part * (values[i] - values[i - 1]))
    return float(values[-1])


def verdict(differences: list[float], higher: bool = False) -> str:
    """`WORSE` or `BETTER` if it is so with every seed, else `MIXED`; differences are hook minus baseline."""
    signs = {(d > 0) - (d < 0) for d in differences}
    if len(signs) > 1 or signs == {0}:
        return MIXED
    return BETTER if (signs == {1}) == higher else WORSE


@dataclass(frozen=True)
class Comparison:
    """One figure of a hook beside the baseline's, one entry per seed."""

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
class Row:
    """A hook in one panel."""

    expr: str
    megabytes: float  # sent by one rank in the whole run
    ratio: float  # of the baseline's bytes to these
    budget: float  # megabytes at which bytes are equal
    steps: dict[str, Comparison]  # figure -> at equal steps
    bytes: dict[str, Comparison]  # figure -> at equal bytes


def compare(ours: list[Record], base: list[Record], expr: str, higher: bool) -> Row:
    """A hook's runs beside the baseline's, in the same order of seeds."""
    pairs = list(zip(ours, base, strict=True))
    budgets = [min(a["wire"][-1], b["wire"][-1]) for a, b in pairs]

    def end(figure: str, up: bool) -> Comparison:
        return Comparison([a[figure][-1] for a in ours], [b[figure][-1] for b in base], up)

    def equal(figure: str, up: bool) -> Comparison:
        every = [[at_bytes(r, m, figure) for r in pair] for pair, m in zip(pairs, budgets, strict=True)]
        return Comparison([a for a, _ in every], [b for _, b in every], up)

    sent = mean(a["wire"][-1] for a in ours)
    figures = {"train": False, "test": higher}
    return Row(
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
        results: the record of every cell.
    """

    def __init__(self, results: dict[Cell, Record]) -> None:
        self.runs: dict[tuple[str, str, str], list[Record]] = {}
        self.settings = {cell.setting.task: cell.setting for cell in results}
        for cell, record in sorted(results.items(), key=lambda item: item[0].seed):
            self.runs.setdefault((cell.setting.task, cell.kind, cell.expr), []).append(record)
        self.seconds = sum(record["seconds"] for record in results.values())
        self.panels = {panel: self._rows(*panel) for panel in PANELS if (*panel, BASELINE) in self.runs}
        self.residual = {
            label: self.runs["mlp", "sorted", expr]
            for label, expr in RESIDUAL.items()
            if ("mlp", "sorted", expr) in self.runs
        }

    def _rows(self, task: str, kind: str) -> list[Row]:
        base = self.runs[task, kind, BASELINE]
        exprs = [expr for t, k, expr in self.runs if (t, k) == (task, kind)]
        return [compare(self.runs[task, kind, e], base, e, TASKS[task].higher) for e in exprs]

    # -- cells as text

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
    def line(row: Row) -> list[tuple[str, str]]:
        """The cells of a row and the verdict on each, empty where there is none to be had."""
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
        """Every cell in which a hook is worse than the baseline with each seed."""
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

    def residual_lines(self) -> tuple[list[str], list[list[str]]]:
        """Headings and rows of the table on residuals."""
        first = next(iter(self.residual.values()))[0]
        marks = [i for i, s in enumerate(first["step"]) if s and s in _quarters(first["step"])]
        steps = [int(first["step"][i]) for i in marks]
        rows = []
        for label, runs in self.residual.items():
            norms = [f"{mean(r['residual'][i] for r in runs):.3g}" for i in marks]
            losses = [spread([r["train"][i] for r in runs]) for i in marks[-2:]]
            rows.append([label, *norms, *losses, spread([r["test"][-1] for r in runs])])
        heads = [f"norm at {s}" for s in steps] + [f"train loss at {s}" for s in steps[-2:]]
        return ["PowerSGD rank 2", *heads, TASKS["mlp"].held_out], rows

    # -- on the screen

    def show(self, console: Console) -> None:
        """Print all tables, and what loses."""
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
        if self.residual:
            heads, lines = self.residual_lines()
            table = Table(*heads, title=f"Residuals, {self.titles('mlp', 'sorted')}", box=box.SIMPLE_HEAD)
            for line in lines:
                table.add_row(*line)
            console.print(table)
        console.print(f"Sum of the runs' times: {self.seconds / 60:.1f} minutes, --jobs at a time")

    # -- as a page

    def markdown(self, command: str, name: str, pictures: list[Any]) -> str:
        """The page for docs/measured."""
        times = f"sum of the runs' times: {self.seconds / 60:.1f} minutes, as many at a time as there are cores"
        lines = [heading(name, command, times, f"raw records: {name}.json"), "<!-- tables -->", ""]
        for (task, kind), rows in self.panels.items():
            lines += [f"## {self.titles(task, kind)}", "", *_table(self.headings(task), [_marked(r) for r in rows]), ""]
        if self.panels:
            lines += [f"## Worse than `{BASELINE}` with every seed", "", *(f"- {x}" for x in self.losing()), ""]
            lines += ["## Left out", "", *(f"- `{hook}`: {why}" for hook, why in LEFT_OUT.items()), ""]
        if self.residual:
            heads, rows = self.residual_lines()
            lines += [f"## Residuals: {self.titles('mlp', 'sorted')}", "", *_table(heads, rows), ""]
        for picture in pictures:
            lines += [f"![{picture.stem}]({picture.name})", ""]
        return "\n".join(lines[:-1]) + "\n"


def spread(values: list[float]) -> str:
    """Mean and standard deviation over the seeds."""
    digits = 4 if abs(mean(values)) < 10 else 2
    return f"{mean(values):.{digits}f}" + (f" ± {stdev(values):.{digits}f}" if len(values) > 1 else "")


def _quarters(steps: list[float]) -> set[float]:
    last = steps[-1]
    return {min(steps, key=lambda s: abs(s - last * part)) for part in (0.05, 0.25, 0.5, 1.0)}


def _marked(row: Row) -> list[str]:
    marks = {WORSE: "**{}** ▼", BETTER: "{} ▲", MIXED: "{}", "": "{}"}
    first, *rest = Report.line(row)
    return [f"`{first[0]}`", *(marks[v].format(text) for text, v in rest)]


def _table(heads: list[str], rows: list[list[str]]) -> list[str]:
    rule = "|---" + "|--:" * (len(heads) - 1) + "|"
    return [f"| {' | '.join(heads)} |", rule, *(f"| {' | '.join(row)} |" for row in rows)]
