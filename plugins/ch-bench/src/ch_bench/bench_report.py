"""What the benchmark says: costs, claims with their intervals, and the bandwidth below which a hook pays."""

import json
import os
import platform
import random
import re
import shlex
import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from ch_bench.checkout import docs

MEASURED = docs() / "measured"
RESAMPLES = 4000
LEVEL = 0.95
BUSY = 0.6  # load per core from which on the ranks share their cores with others
CLAIMS = [  # ours, PyTorch's, limit of the ratio of their costs
    *((f"powersgd(rank={r}), {b}", f"torch PowerSGD rank {r}, 1 bucket", 0.5)
      for r in (1, 4) for b in ("1 bucket", "3 buckets")),
    ("allreduce", "torch allreduce", 1.0),
    ("bf16_compress", "torch bf16", 1.0),
    ("fp16_compress", "torch fp16", 1.0),
]  # fmt: skip
STEP_CLAIMS = {  # on a shaped link: ours, the baseline, limit of the ratio of their whole steps
    "1gbit": (("quant4", "bf16_compress", 0.65), ("quant8", "bf16_compress", 1.0)),
    "200mbit": (("quant4", "bf16_compress", 0.4), ("quant8", "bf16_compress", 1.0)),
}
BASELINES = ("bf16_compress", "allreduce")  # the honest one first: nobody has to send fp32


class Costs:
    """Costs over the step without communication, per candidate and block, in seconds."""

    def __init__(self, result: dict[str, Any]) -> None:
        self.runs: dict[str, dict[str, Any]] = {run["label"]: run for run in result["runs"]}
        self.steps: dict[str, list[float]] = {
            label: [median(block) for block in run["blocks"]] for label, run in self.runs.items()
        }
        noop = self.steps["noop"]
        self.blocks = {k: [s - n for s, n in zip(steps, noop, strict=True)] for k, steps in self.steps.items()}

    def cost(self, label: str) -> tuple[float, float, float]:
        """Median over the blocks and its interval."""
        return interval(self.blocks[label])

    def ratio(self, ours: str, theirs: str) -> tuple[float, float, float]:
        """Ratio of two costs, formed in each block: median and interval."""
        return interval([a / b for a, b in zip(self.blocks[ours], self.blocks[theirs], strict=True)])

    def step_ratio(self, ours: str, theirs: str) -> tuple[float, float, float]:
        """Ratio of two whole steps, formed in each block: median and interval."""
        return interval([a / b for a, b in zip(self.steps[ours], self.steps[theirs], strict=True)])

    def claims(self, link: str | None) -> list[tuple[str, str, str, float, tuple[float, float, float]]]:
        """What is compared, ours, theirs, the limit, and the ratio with its interval, of the claims whose hooks were timed."""
        costs = [("cost", *claim, self.ratio) for claim in CLAIMS]
        steps = [("step", *claim, self.step_ratio) for claim in STEP_CLAIMS.get(link or "", ())]
        return [
            (what, ours, theirs, limit, ratio(ours, theirs))
            for what, ours, theirs, limit, ratio in (*costs, *steps)
            if ours in self.runs and theirs in self.runs
        ]

    def speed_up(self, label: str, baseline: str) -> float:
        """How many times shorter the whole step is than the baseline's."""
        return float(median(b / a for a, b in zip(self.steps[label], self.steps[baseline], strict=True)))

    def break_even(self, label: str, baseline: str) -> float | None:
        """Bits per second below which this hook's step is the shorter one; None where it never is; inf: always.

        On loopback the wire costs next to nothing, so what differs there is arithmetic; on a link of B bits per second
        the difference in bytes adds 8 * bytes / B. Overlap with backward and latency are left out.
        """
        slower = self.cost(label)[0] - self.cost(baseline)[0]
        fewer: float = self.runs[baseline]["wire"] - self.runs[label]["wire"]
        if fewer <= 0:
            return None
        return 8 * fewer / slower if slower > 0 else float("inf")


def interval(values: list[float]) -> tuple[float, float, float]:
    """Median, and the bootstrap interval of the median: ``(median, low, high)``."""
    rng = random.Random(0)
    medians = sorted(median(rng.choices(values, k=len(values))) for _ in range(RESAMPLES))
    tail = int(RESAMPLES * (1 - LEVEL) / 2)
    return median(values), medians[tail], medians[-1 - tail]


def show(result: dict[str, Any], console: Console) -> None:
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
            f"[bold red]The machine was busy before this began[/] (load {result['load_before']:.1f} on "
            f"{os.cpu_count()} cores): the intervals are wide and the times mean little. Repeat when it is quiet."
        )
    console.print(_cost_table(costs), _claim_table(costs, result["link"]), sep="\n")
    if not result["link"]:
        console.print(_break_even_table(costs))
        console.print("On loopback compression may look slower than none: the wire is as fast as memory there.")


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
    table = Table(title="Costs beside PyTorch's own hooks, and whole steps beside bf16_compress", box=box.SIMPLE_HEAD)
    for name in ("ratio of", "ours", "theirs"):
        table.add_column(name)
    for name in ("ratio", "interval", "limit", "claim"):
        table.add_column(name, justify="right", no_wrap=True)
    for what, ours, theirs, limit, (ratio, low, high) in costs.claims(link):
        verdict = "[bold green]HOLDS[/]" if high <= limit else "[bold red]FAILS[/]"
        undecided = " (limit inside)" if low <= limit < high else ""
        table.add_row(what, ours, theirs, f"{ratio:.2f}", f"{low:.2f} … {high:.2f}", f"{limit:g}", verdict + undecided)
    return table


def _break_even_table(costs: Costs) -> Table:
    table = Table(
        title="Break-even: a hook shortens the step on links slower than",
        caption="estimate: arithmetic measured here, bytes counted; no overlap, no latency",
        box=box.SIMPLE_HEAD,
    )
    table.add_column("hook")
    for baseline in BASELINES:
        table.add_column(f"against {baseline}", justify="right")
    for label in costs.runs:
        if label not in ("noop", "allreduce") and not label.startswith("torch"):
            table.add_row(label, *(bandwidth(costs.break_even(label, baseline)) for baseline in BASELINES))
    return table


def bandwidth(bits: float | None) -> str:
    """Bits per second, for people."""
    if bits is None:
        return "never"
    if bits == float("inf"):
        return "any"
    return f"{bits / 1e9:.1f} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.0f} Mbit/s"


def write(results: list[dict[str, Any]], console: Console, out: Path) -> None:
    """Leave ``bench.json`` (raw times and the claims) and ``bench.txt`` (what was printed) in ``out``."""
    for result in results:
        fields = ("what", "ours", "theirs", "limit", "ratio", "low", "high")
        found = Costs(result).claims(result["link"])
        result["claims"] = [dict(zip(fields, (*claim, *ratio), strict=True)) for *claim, ratio in found]
    (out / "bench.json").write_text(json.dumps({"machine": machine(), "results": results}, indent=1))
    (out / "bench.txt").write_text(console.export_text(clear=False))


def machine() -> dict[str, Any]:
    """What the numbers depend on."""
    model = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
        model = found[1] if found else model
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    return {"cpu": model, "cores": os.cpu_count(), "gpu": gpu, "system": platform.system(), **versions}


def command(module: str, argv: Sequence[str] | None = None, *, environment: str = "") -> str:
    """A program's command line, without folders of this machine.

    >>> command("ch_bench.cost.codec", ["--out", "x", "--hooks", "topk(bits=2)"], environment="OMP_NUM_THREADS=1")
    "OMP_NUM_THREADS=1 python -m ch_bench.cost.codec --hooks 'topk(bits=2)'"
    """
    words = list(sys.argv[1:] if argv is None else argv)
    kept = [word for i, word in enumerate(words) if word != "--out" and (i == 0 or words[i - 1] != "--out")]
    return " ".join([*([environment] if environment else []), "python -m", module, *map(shlex.quote, kept)])


def digits(value: float) -> str:
    """Three significant digits: a quick machine's small shapes do not come out as 0.0.

    >>> digits(0.012345), digits(12345.6)
    ('0.0123', '12300')
    """
    return f"{float(f'{value:.3g}'):.15g}"


def heading(title: str, made_by: str, *notes: str) -> str:
    """How every record begins: what it is, the command that made it, the machine, and ``notes``, an item each."""
    items = [*(f"{key}: {value}" for key, value in machine().items()), *notes]
    return "\n".join([f"# {title}", "", f"    {made_by}", "", *(f"- {item}" for item in items), ""])


def record(name: str, made_by: str, console: Console) -> Path:
    """Keep what was printed, and the command that made it, as ``docs/measured/NAME-DATE.md``."""
    MEASURED.mkdir(exist_ok=True)
    path = MEASURED / f"{name}-{date.today().isoformat()}.md"
    raw = "\n".join(line.rstrip() for line in console.export_text(clear=False).splitlines())
    path.write_text(f"{heading(f'{name}, {date.today().isoformat()}', made_by)}\n```text\n{raw}\n```\n")
    return path.relative_to(MEASURED.parent.parent)
