"""`commhooks bench --model module:callable --hooks EXPR ...`: what a step takes with each hook, on any model.

Hooks take turns in rounds, in an order drawn anew for each round, on one model. What is shown is the median of all rounds'
medians, with a bootstrap interval, against `allreduce`; hooks that lose are shown like the others.
"""

import argparse
import json
import random
import sys
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from ch_bench import launch
from ch_bench.advise.predict import HOOKS, measure
from ch_bench.advise.workload import load
from ch_bench.bench_report import interval, machine
from ch_bench.links import netns


def run(args: argparse.Namespace, console: Console) -> int:
    """Measure on every link; leave ``model.json`` and, with matplotlib, ``model.png`` in ``args.out``."""
    hooks = list(dict.fromkeys(["noop", "allreduce", *(args.hooks or HOOKS)]))
    args.out.mkdir(parents=True, exist_ok=True)
    results = []
    for rate in args.rates:
        path = args.out / f"model-{rate or 'loopback'}.json"
        with netns.Network(args.nproc, rate) if rate else nullcontext() as net:
            if net is not None:
                net.verify()
            try:
                launch.launch(worker, args.nproc, vars(args), hooks, path, enter=net.enter if net else None)
            except launch.WorkerFailed as error:
                print(error, file=sys.stderr)
                return 1
        results.append({"link": rate or "loopback", **json.loads(path.read_text())})
        console.print(table(results[-1]))
    (args.out / "model.json").write_text(json.dumps({"machine": machine(), "results": results}, indent=1))
    console.print(_plotted(results, args.out / "model.png"), soft_wrap=True)
    return 0


def worker(rank: int, world: int, device: torch.device, args: dict[str, Any], hooks: list[str], path: Path) -> None:
    """One rank; rank 0 leaves the medians of every round in ``path``."""
    work = load(args["model"] or "gpt", device)
    rounds: dict[str, list[float]] = {hook: [] for hook in hooks}
    seconds = args["budget"] / len(hooks) / args["blocks"]
    console = Console(stderr=True)
    with Progress(console=console, disable=rank != 0 or not console.is_terminal) as progress:
        task = progress.add_task("", total=args["blocks"] * len(hooks))
        for block in range(args["blocks"]):
            for hook in random.Random(block).sample(hooks, len(hooks)):  # the same order on every rank
                progress.update(task, description=hook)
                rounds[hook].append(median(measure(work, hook, steps=args["steps"], seconds=seconds)))
                progress.advance(task)
    if rank == 0:
        numel = sum(p.numel() for p in work.model.parameters())
        about = {"model": args["model"] or "gpt", "parameters": numel, "world": world, "device": str(device)}
        path.write_text(json.dumps({**about, "rounds": rounds}))


def table(result: dict[str, Any]) -> Table:
    """One link's hooks; slower ones in red."""
    rounds: dict[str, list[float]] = result["rounds"]
    title = (
        f"{result['model']}, {result['parameters'] / 1e6:.1f} M parameters, {result['world']} ranks, {result['link']}"
    )
    made = Table(title=title, box=None, header_style="bold", pad_edge=False)
    made.add_column("hook", overflow="fold", min_width=min(30, max(map(len, rounds))))
    for name in ("a step", "interval", "against allreduce"):
        made.add_column(name, justify="right", no_wrap=True)
    for hook, values in rounds.items():
        middle, low, high = interval(values)
        faster = median(a / b for a, b in zip(rounds["allreduce"], values, strict=True))
        verdict = (
            "·" if hook == "allreduce" else f"{faster:.2f}× as fast" if faster >= 1 else f"{1 / faster:.2f}× slower"
        )
        cells = (f"{middle * 1e3:.1f} ms", f"{low * 1e3:.1f} … {high * 1e3:.1f} ms", verdict)
        made.add_row(Text(hook), *cells, style="" if faster >= 1 else "red")
    return made


def _plotted(results: list[dict[str, Any]], path: Path) -> str:
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
