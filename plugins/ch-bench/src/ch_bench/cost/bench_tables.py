"""Tables of `commhooks bench`: costs, claims with intervals, and the bandwidth below which a hook pays off."""

import json
import os
from pathlib import Path
from statistics import median
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ch_bench.record import LEVEL, Interval, interval, machine
from ch_bench.tables import bandwidth, columns

BUSY = 0.6  # load per core from which other programs disturb the ranks
CLAIMS = [  # ours, PyTorch's, limit of the ratio of their costs
    *((f"powersgd(rank={r}), {b}", f"torch PowerSGD rank {r}, 1 bucket", 0.5)
      for r in (1, 4) for b in ("1 bucket", "3 buckets")),
    ("allreduce", "torch allreduce", 1.0),
    ("bf16_compress", "torch bf16", 1.0),
    ("fp16_compress", "torch fp16", 1.0),
]  # fmt: skip
STEP_CLAIMS = {  # on a shaped link: ours, the baseline, limit of the ratio of whole steps
    "1gbit": (("quant4", "bf16_compress", 0.65), ("quant8", "bf16_compress", 1.0)),
    "200mbit": (("quant4", "bf16_compress", 0.4), ("quant8", "bf16_compress", 1.0)),
}
BASELINES = ("bf16_compress", "allreduce")
Result = dict[str, Any]


class Costs:
    """Seconds beyond a step without communication, by candidate and block."""

    def __init__(self, result: Result) -> None:
        self.runs: dict[str, Result] = {run["label"]: run for run in result["runs"]}
        self.steps: dict[str, list[float]] = {
            label: [median(block) for block in run["blocks"]] for label, run in self.runs.items()
        }
        noop = self.steps["noop"]
        self.blocks = {k: [s - n for s, n in zip(steps, noop, strict=True)] for k, steps in self.steps.items()}

    def cost(self, label: str) -> Interval:
        """Return the median cost over the blocks and its interval."""
        return interval(self.blocks[label])

    def ratio(self, ours: str, theirs: str) -> Interval:
        """Return the ratio of two costs, formed in each block."""
        return interval([a / b for a, b in zip(self.blocks[ours], self.blocks[theirs], strict=True)])

    def step_ratio(self, ours: str, theirs: str) -> Interval:
        """Return the ratio of two whole steps, formed in each block."""
        return interval([a / b for a, b in zip(self.steps[ours], self.steps[theirs], strict=True)])

    def claims(self, link: str | None) -> list[tuple[str, str, str, float, Interval]]:
        """Return quantity, ours, theirs, limit and ratio of every claim whose two hooks were timed."""
        costs = [("cost", *claim, self.ratio) for claim in CLAIMS]
        steps = [("step", *claim, self.step_ratio) for claim in STEP_CLAIMS.get(link or "", ())]
        return [
            (quantity, ours, theirs, limit, ratio(ours, theirs))
            for quantity, ours, theirs, limit, ratio in (*costs, *steps)
            if ours in self.runs and theirs in self.runs
        ]

    def speed_up(self, label: str, baseline: str) -> float:
        """Return how many times shorter the whole step is than the baseline's."""
        return float(median(b / a for a, b in zip(self.steps[label], self.steps[baseline], strict=True)))

    def break_even(self, label: str, baseline: str) -> float | None:
        """Return the bits per second below which this hook has the shorter step.

        ``None`` means never, and infinity always. Loopback costs show the difference in arithmetic; on a link of B bits
        per second the difference in bytes adds 8 * bytes / B. Overlap with the backward and latency are ignored.
        """
        slower = self.cost(label)[0] - self.cost(baseline)[0]
        fewer: float = self.runs[baseline]["wire"] - self.runs[label]["wire"]
        if fewer <= 0:
            return None
        return 8 * fewer / slower if slower > 0 else float("inf")


def show(result: Result, console: Console) -> None:
    """Print the tables of one link."""
    costs = Costs(result)
    link = "loopback"
    if result["link"]:
        link = f"{result['link']} (a transfer reached {result['verified_bits'] / 1e6:.0f} Mbit/s)"
    console.rule(f"[bold]{link}")
    blocks = result["runs"][0]["blocks"]
    console.print(
        f"GPT with {result['parameters'] / 1e6:.1f} M parameters, {result['world']} ranks on {result['device']}, "
        f"{len(blocks)} blocks of {len(blocks[0])} interleaved steps; intervals are {LEVEL:.0%} bootstrap over blocks"
    )
    if result["load_before"] > BUSY * (os.cpu_count() or 1):
        console.print(
            f"[bold red]The machine was busy at the start[/] (load {result['load_before']:.1f} on {os.cpu_count()} cores). "
            "The times are not reliable: repeat on an idle machine."
        )
    console.print(_cost_table(costs), _claim_table(costs, result["link"]), sep="\n")
    if not result["link"]:
        console.print(_break_even_table(costs))
        console.print("Over loopback, compression may be slower than none: the wire is as fast as memory.")


def _cost_table(costs: Costs) -> Table:
    noop = median(costs.steps["noop"])
    table = Table(title=f"Cost over a step without communication ({noop * 1e3:.1f} ms)", box=box.SIMPLE_HEAD)
    table.add_column("hook")
    for name in ("step ms", "cost ms", "interval", "sent MB", "step vs bf16", "step vs fp32"):
        table.add_column(name, justify="right", no_wrap=True)
    for label, run in costs.runs.items():
        if label == "noop":
            continue
        cost, low, high = costs.cost(label)
        table.add_row(
            label,
            f"{median(costs.steps[label]) * 1e3:.1f}",
            f"{cost * 1e3:.1f}",
            f"{low * 1e3:.1f} … {high * 1e3:.1f}",
            f"{run['wire'] / 1e6:.3f}",
            *(_times(costs.speed_up(label, baseline), label == baseline) for baseline in BASELINES),
            style="dim" if label.startswith("torch") else "",
        )
    return table


def _times(speed_up: float, itself: bool) -> str:
    if itself:
        return "·"
    return f"[green]{speed_up:.2f}× faster[/]" if speed_up >= 1 else f"[red]{1 / speed_up:.2f}× slower[/]"


def _claim_table(costs: Costs, link: str | None) -> Table:
    title = "Costs compared with PyTorch's own hooks, and whole steps compared with bf16_compress"
    table = Table(title=title, box=box.SIMPLE_HEAD)
    for name in ("ratio of", "ours", "theirs"):
        table.add_column(name)
    for name in ("ratio", "interval", "limit", "claim"):
        table.add_column(name, justify="right", no_wrap=True)
    for quantity, ours, theirs, limit, (ratio, low, high) in costs.claims(link):
        verdict = "[bold green]HOLDS[/]" if high <= limit else "[bold red]FAILS[/]"
        undecided = " (limit inside)" if low <= limit < high else ""
        interval_ = f"{low:.2f} … {high:.2f}"
        table.add_row(quantity, ours, theirs, f"{ratio:.2f}", interval_, f"{limit:g}", verdict + undecided)
    return table


def _break_even_table(costs: Costs) -> Table:
    table = Table(
        title="Break-even: a hook shortens the step on links slower than",
        caption="estimate from measured arithmetic and counted bytes, without overlap and latency",
        box=box.SIMPLE_HEAD,
    )
    table.add_column("hook")
    for baseline in BASELINES:
        table.add_column(f"against {baseline}", justify="right")
    for label in costs.runs:
        if label not in ("noop", "allreduce") and not label.startswith("torch"):
            table.add_row(label, *(bandwidth(costs.break_even(label, baseline)) for baseline in BASELINES))
    return table


def write(results: list[Result], console: Console, out: Path) -> None:
    """Write ``bench.json`` (raw times and claims) and ``bench.txt`` (the printed tables) to ``out``."""
    for result in results:
        fields = ("quantity", "ours", "theirs", "limit", "ratio", "low", "high")
        found = Costs(result).claims(result["link"])
        result["claims"] = [dict(zip(fields, (*claim, *ratio), strict=True)) for *claim, ratio in found]
    (out / "bench.json").write_text(json.dumps({"machine": machine(), "results": results}, indent=1))
    (out / "bench.txt").write_text(console.export_text(clear=False))


def model_table(result: Result) -> Table:
    """Return the table of ``bench --model``; slower hooks are red."""
    rounds: dict[str, list[float]] = result["rounds"]
    size = f"{result['parameters'] / 1e6:.1f} M parameters, {result['world']} ranks, {result['link']}"
    made = columns("hook", "a step", "interval", "against allreduce")
    made.title, made.columns[0].min_width = f"{result['model']}, {size}", min(30, max(map(len, rounds)))
    for hook, values in rounds.items():
        middle, low, high = interval(values)
        faster = median(a / b for a, b in zip(rounds["allreduce"], values, strict=True))
        verdict = f"{faster:.2f}× as fast" if faster >= 1 else f"{1 / faster:.2f}× slower"
        cells = (f"{middle * 1e3:.1f} ms", f"{low * 1e3:.1f} … {high * 1e3:.1f} ms")
        made.add_row(Text(hook), *cells, "·" if hook == "allreduce" else verdict, style="" if faster >= 1 else "red")
    return made


def draw_model(results: list[Result], path: Path) -> str:
    """Plot the results of ``bench --model`` if matplotlib is installed; return a line for the user."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return "no plot: pip install 'ch-bench[plots]'"
    figure = Figure(figsize=(9, 1.2 + 0.35 * sum(len(one["rounds"]) for one in results)), layout="constrained")
    axes = figure.subplots(len(results), squeeze=False)
    for ax, result in zip(axes[:, 0], results, strict=True):
        names = list(result["rounds"])[::-1]
        ax.barh(names, [median(result["rounds"][name]) * 1e3 for name in names])
        ax.set_title(f"{result['model']}, {result['world']} ranks, {result['link']}", loc="left")
        ax.set_xlabel("ms a step")
    figure.savefig(path)
    return f"plot: {path}"
