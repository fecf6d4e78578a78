"""Loss of outer optimizers at equal tokens, against the bytes that they send.

    python -m ch_bench.outer.quality [--size pilot|small|long|full] [--seeds 3] [--minutes M] [--record]

Four workers train the GPT on text, once with the exact mean of the gradients at every step, and once with each outer method
(H, outer rate and momentum, exchange). Workers are simulated ranks in one process; nothing is timed. Every finished run is kept
in a JSON file and does not run again. `--minutes` stops between runs. The table shows all finished runs; ``*`` marks the Pareto
front, on which no other run sends fewer bytes and loses less.
"""

import argparse
import math
import multiprocessing
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import matplotlib
import torch
from matplotlib.figure import Figure

from ch_bench import gpt, record, text
from ch_bench.outer.methods import Method, quality_methods
from commhooks.simulate import SimulatedRank, simulate

Record = dict[str, Any]
Rows = list[tuple[int, float]]  # step, held-out loss
COLOURS = ("#000000", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9")  # distinct also for colour-blind readers


@dataclass(frozen=True)
class Size:
    """A model and the length of its training."""

    steps: int
    width: int = 128
    layers: int = 4
    context: int = 64
    batch: int = 8  # per worker
    workers: int = 4
    lr: float = 2e-3


SIZES = {
    "pilot": Size(steps=600, width=32, layers=2, context=32),
    "long": Size(steps=9000, width=32, layers=2, context=32, batch=16, lr=8e-3),  # all-reduce is flat at the end
    "small": Size(steps=3000, width=64, layers=2),
    "full": Size(steps=3000),
}


@dataclass(frozen=True)
class QualityRun:
    """One training run: a method, a size and a seed."""

    size_name: str
    size: Size
    method: Method
    seed: int

    @property
    def key(self) -> str:
        """Key of the finished run; it contains everything that decides the result."""
        return f"{self.size_name} {self.size.steps} steps, {self.method.label}, seed {self.seed}"

    def run(self) -> Record:
        """Train and return the record."""
        torch.set_num_threads(1)
        begun = time.perf_counter()
        data = text.load()
        body = partial(_outer, self, data) if self.method.every else partial(_every_step, self, data)
        workers = self.size.workers if self.method.every else 1
        rows, sent = simulate(workers, body)[0]
        return {
            "method": self.method.as_dict(),
            "label": self.method.label,
            "size": asdict(self.size),
            "seed": self.seed,
            "held_out": rows,
            "wire_bytes": sent,
            "seconds": round(time.perf_counter() - begun, 1),
        }


def runs(size_name: str, seeds: int, steps: int | None) -> list[QualityRun]:
    """Return every method, seed by seed."""
    size = SIZES[size_name] if steps is None else replace(SIZES[size_name], steps=steps)
    return [QualityRun(size_name, size, method, seed) for seed in range(seeds) for method in quality_methods()]


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description="Loss of outer optimizers at equal tokens, against bytes sent.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--size", choices=list(SIZES), default="small", help="model and steps")
    parser.add_argument("--steps", type=int, help="number of steps, instead of the size's own")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds of weights and data")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="methods of these names, and all-reduce")
    parser.add_argument("--minutes", type=float, default=1e9, help="start no run after this time")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, each in its own process")
    parser.add_argument("--out", type=Path, default=Path("quality-out"), help="folder for quality.json")
    parser.add_argument(
        "--record", action="store_true", help="write table, plot and runs to docs/measured/outer-quality.*"
    )
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Run the missing methods and print the table."""
    args = parse(argv)
    wanted = runs(args.size, args.seeds, args.steps)
    if args.only:
        wanted = [one for one in wanted if not one.method.every or one.method.label in args.only]
    finished = record.FinishedRuns(args.out / "quality.json")
    missing = [one for one in wanted if one.key not in finished.runs]
    until = time.monotonic() + 60 * args.minutes
    context = multiprocessing.get_context("spawn")
    for first in range(0, len(missing), args.jobs):
        if time.monotonic() > until:
            break
        batch = missing[first : first + args.jobs]
        with context.Pool(len(batch)) as pool:  # new processes, so that a run starts with fresh memory
            for one, made in zip(batch, pool.imap(QualityRun.run, batch), strict=True):
                finished.put(one.key, made)
                print(f"{one.key}: {made['held_out'][-1][1]:.4f} in {made['seconds']:.0f} s", flush=True)
    found = [finished.runs[one.key] for one in wanted if one.key in finished.runs]
    if not found:
        print("no run is finished")
        return 0
    shown = table(found, parameters(wanted[0].size))
    left = len(wanted) - len(found)
    print(shown, f"{len(found)} runs, {left} missing" if left else "all runs are finished", sep="\n\n")
    if args.record:
        folder = record.measured()
        draw(found, folder / "outer-quality.png")
        (folder / "outer-quality.json").write_text(record.json_lines(found))
        notes = [f"{left} runs of the command were not finished"] if left else []
        title = "Loss of outer optimizers at equal tokens, against bytes sent"
        body = f"<!-- tables -->\n\n{shown}\n\n![outer-quality](outer-quality.png)"
        made_by = record.command("ch_bench.outer.quality", argv)
        record.write("outer-quality", title, made_by, body, *notes, "raw records: outer-quality.json")
    return 0


def parameters(size: Size) -> int:
    """Return the number of parameters of the model."""
    return gpt.count_parameters(_net(size, text.load().vocab))


def _net(size: Size, vocab: int) -> gpt.GPT:
    return gpt.GPT(vocab, size.context, size.width, size.layers, heads=max(1, size.width // 32))


def _start(one: QualityRun, vocab: int) -> tuple[gpt.GPT, torch.optim.Optimizer]:
    torch.manual_seed(one.seed)  # simulated ranks take turns, so no other rank draws in between
    net = _net(one.size, vocab)
    return net, torch.optim.AdamW(net.parameters(), lr=one.size.lr, betas=(0.9, 0.95), weight_decay=0.01)


def _schedule(size: Size, step: int) -> float:
    """Return the learning rate: a warm-up over a tenth of the steps, then half a cosine down to a tenth."""
    warm = min(1.0, (step + 1) / max(1, size.steps // 10))
    return size.lr * warm * (0.55 + 0.45 * math.cos(math.pi * step / size.steps))


def _marks(size: Size) -> set[int]:
    return {size.steps * part // 5 for part in range(1, 6)}


@torch.no_grad()
def _held_out(net: gpt.GPT, data: text.Text, size: Size) -> float:
    # All held-out text: on 256 windows two equally good models differ by 0.4 %.
    x, y = text.validation(data.val, size.context, windows=len(data.val) // size.context)
    parts = zip(x.split(64), y.split(64), strict=True)
    return float(sum(net(px, py).item() * len(px) for px, py in parts) / len(x))


def _outer(one: QualityRun, data: text.Text, rank: SimulatedRank) -> tuple[Rows, float]:
    size, method = one.size, one.method
    net, inner = _start(one, data.vocab)
    # The four workers take turns, so the time-out must cover the steps of all of them.
    optimizer = method.outer(inner, net, transport=rank.transport, timeout=3600.0)
    batches = text.Batches(data.train, size.batch, size.context, rank.rank, one.seed)
    rows = []
    for step in range(size.steps):
        for group in optimizer.param_groups:
            group["lr"] = method.inner * _schedule(size, step)
        x, y = batches[step]
        optimizer.zero_grad()
        net(x, y).backward()
        optimizer.step()
        if step + 1 == size.steps:
            optimizer.finish()
        if step + 1 in _marks(size) and rank.rank == 0:
            with optimizer.global_parameters():
                rows.append((step + 1, round(_held_out(net, data, size), 5)))
    return rows, optimizer.stats()["wire_bytes"]


def _every_step(one: QualityRun, data: text.Text, rank: SimulatedRank) -> tuple[Rows, float]:
    """Train with the exact mean at every step: all workers have the same weights, so one model is enough."""
    size = one.size
    net, inner = _start(one, data.vocab)
    every = [text.Batches(data.train, size.batch, size.context, worker, one.seed) for worker in range(size.workers)]
    rows = []
    for step in range(size.steps):
        for group in inner.param_groups:
            group["lr"] = _schedule(size, step)
        inner.zero_grad()
        for batches in every:
            x, y = batches[step]
            (net(x, y) / size.workers).backward()
        inner.step()
        if step + 1 in _marks(size):
            rows.append((step + 1, round(_held_out(net, data, size), 5)))
    share = 2 * (size.workers - 1) / size.workers
    return rows, share * 4.0 * gpt.count_parameters(net) * size.steps


# -- table and plot


def rows(found: Iterable[Record]) -> list[Record]:
    """Return a row for each method with its mean over seeds, bytes and Pareto mark; the baseline comes first."""
    by_label: dict[str, list[Record]] = {}
    for one in found:
        by_label.setdefault(one["label"], []).append(one)
    made = []
    for label, same in by_label.items():
        losses = [one["held_out"][-1][1] for one in same]
        made.append(
            {
                "label": label,
                "every": same[0]["method"]["every"],
                "seeds": len(same),
                "loss": mean(losses),
                "spread": stdev(losses) if len(losses) > 1 else 0.0,
                "sent": mean(one["wire_bytes"] for one in same),
            }
        )
    for row in made:
        row["front"] = not any(
            other["sent"] <= row["sent"] and other["loss"] <= row["loss"] and other is not row for other in made
        )
    return sorted(made, key=lambda row: (row["every"] > 0, -row["sent"], row["loss"]))


def table(found: list[Record], numel: int) -> str:
    """Return the runs as a Markdown table."""
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


def draw(found: list[Record], path: Path) -> None:
    """Plot held-out loss against bytes, a point for each method, and the Pareto front."""
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


if __name__ == "__main__":
    record.run_main(main)
