"""Predicted against measured: every model on every link, and whether the advice was good.

    python -m ch_bench.advise.validate [--links loopback,1gbit,200mbit,50mbit] [--models gpt,mlp,convnet] [--record]

Two ranks, one thread each, in network namespaces whose uplinks are shaped (root and iproute2). For each model and link the
ranks train with each hook, advise, as `commhooks advise` does, and train with each hook once more. A cell is a model, a link
and a hook; it is good if prediction and measurement differ by at most 20 % of the measurement. The advice is good if the hook
that was recommended is the fastest that was measured, or within 5 % of it. A machine that is busy with something else makes
both worthless.
"""

import argparse
import json
import sys
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress

from ch_bench import bench_report, launch
from ch_bench.advise.predict import HOOKS, advise, measure
from ch_bench.advise.workload import load
from ch_bench.links import netns

LIMIT, NEAR, SHARE = 0.20, 0.05, 0.9


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Compare what advise predicts with what is measured.")
    parser.add_argument("--links", default="loopback,1gbit,200mbit,50mbit")
    parser.add_argument("--models", default="gpt,mlp,convnet", help="names, or module:callable")
    parser.add_argument("--hooks", nargs="+", default=list(HOOKS))
    parser.add_argument("--steps", type=int, default=10, help="measured steps, fewer where they take long")
    parser.add_argument("--seconds", type=float, default=60.0, help="of one probe")
    parser.add_argument("--out", type=Path, default=Path("advise-out"))
    parser.add_argument("--record", nargs="?", const="advise", metavar="NAME", help="keep the output in docs/measured")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Print all cells; 1 if too few are good, or an advice is bad."""
    args = parse(argv)
    console = Console(record=True, width=None if sys.stdout.isatty() else 100)
    args.out.mkdir(parents=True, exist_ok=True)
    cells: list[dict[str, Any]] = []
    advices: list[dict[str, Any]] = []
    links, models = args.links.split(","), args.models.split(",")
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("validate", total=len(links) * len(models))
        for link in links:
            rate = None if link == "loopback" else link
            if rate and netns.why_not():
                console.print(f"{link}: skipped: {netns.why_not()}")
                continue
            with netns.Network(2, rate) if rate else nullcontext() as net:
                if net is not None:
                    net.verify()
                for model in models:
                    progress.update(task, description=f"{model} on {link}")
                    path = args.out / f"{model.replace(':', '.')}-{link}.json"
                    launch.launch(worker, 2, model, vars(args), path, enter=net.enter if net else None)
                    found = json.loads(path.read_text())
                    cells += [{"model": model, "link": link, **one} for one in found["cells"]]
                    advices.append({"model": model, "link": link, **found["advice"]})
                    progress.advance(task)
    good = show(cells, advices, console)
    (args.out / "validate.json").write_text(
        json.dumps({"machine": bench_report.machine(), "cells": cells, "advices": advices}, indent=1)
    )
    if args.record:
        command = bench_report.command("ch_bench.advise.validate", argv)
        console.print(f"recorded: {bench_report.record(args.record, command, console)}")
    return 0 if good else 1


def worker(rank: int, world: int, device: torch.device, model: str, args: dict[str, Any], path: Path) -> None:
    """One rank: train with each hook, before and after advising: a machine is not the same from minute to minute."""
    work = load(model, device)
    hooks = list(dict.fromkeys(["allreduce", *args["hooks"]]))
    before = {hook: measure(work, hook, steps=args["steps"] // 2, seconds=15.0) for hook in hooks}
    advice = advise(work, hooks, seconds=args["seconds"])
    cells = []
    for one in advice.predictions:
        measured = before[one.hook] + measure(work, one.hook, steps=args["steps"] - args["steps"] // 2, seconds=15.0)
        cells.append({**asdict(one), "measured": median(measured), "all": measured})
    if rank == 0:
        network = asdict(advice.network)
        network["curves"] = {" ".join(key): asdict(curve) for key, curve in advice.network.curves.items()}
        about = {
            "recommended": advice.recommended,
            "reasons": advice.reasons,
            "alone": advice.alone,
            "network": network,
        }
        path.write_text(json.dumps({"cells": cells, "advice": about}, default=str))


def show(cells: list[dict[str, Any]], advices: list[dict[str, Any]], console: Console) -> bool:
    """All cells, the bad ones marked; whether enough of them, and every advice, are good."""
    console.print(f"{'model':<9} {'link':<9} {'hook':<18} {'predicted':>10} {'measured':>10}  {'off':>6}")
    right = 0
    for cell in cells:
        off = cell["seconds"] / cell["measured"] - 1
        right += abs(off) <= LIMIT
        mark = "" if abs(off) <= LIMIT else "  [red]beyond 20 %[/]"
        times = f"{cell['seconds'] * 1e3:>7.1f} ms {cell['measured'] * 1e3:>7.1f} ms"
        console.print(
            f"{cell['model']:<9} {cell['link']:<9} {cell['hook']:<18} {times}  {off:>+6.0%}{mark}", highlight=False
        )
    bad = 0
    for advice in advices:
        mine = [cell for cell in cells if (cell["model"], cell["link"]) == (advice["model"], advice["link"])]
        fastest = min(mine, key=lambda cell: cell["measured"])
        taken = next(cell for cell in mine if cell["hook"] == advice["recommended"])
        loses = taken["measured"] / fastest["measured"] - 1
        bad += loses > NEAR
        mark = "" if loses <= NEAR else "  [red]beyond 5 %[/]"
        console.print(
            f"{advice['model']} on {advice['link']}: {advice['recommended']}; the fastest measured is {fastest['hook']}, "
            f"{loses:.1%} faster{mark}",
            highlight=False,
            soft_wrap=True,
        )
    enough = bool(cells) and right >= SHARE * len(cells)
    console.print(
        f"{right} of {len(cells)} cells within 20 %; {len(advices) - bad} of {len(advices)} advices within 5 %"
    )
    return enough and not bad


if __name__ == "__main__":
    sys.exit(main())
