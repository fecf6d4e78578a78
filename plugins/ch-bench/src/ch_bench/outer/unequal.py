"""Two workers, one of them throttled: rounds of equal steps against rounds of unequal steps.

    python -m ch_bench.outer.unequal [--steps 300] [--every 16] [--seeds 3] [--record]

Two gloo processes train a small GPT on text with an outer optimizer. The second one may use the CPU for half of the time: a
CPU quota of its control group (needs root and cgroups), otherwise a sleep after each step as long as the step. Rounds have equal
tokens: ``every`` steps on each rank, or as many tokens of both ranks together, of which the faster rank trains more.

The goal is the mean of the last three held-out losses of plain all-reduce after ``--steps`` steps, which is trained without a
throttle. The model of each round is kept with its time and tokens, and is evaluated after the run.
"""

import argparse
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import torch.distributed as dist

from ch_bench import gpt, launch, record, text
from ch_bench.outer.training import WINDOWS, adamw, make_net, set_rate
from ch_outer import OuterOptimizer

PERIOD = 10_000  # microseconds of the CPU quota
Row = tuple[float, float, float]  # seconds, tokens of both ranks, held-out loss
Settings = dict[str, Any]
KINDS = ("all-reduce", "equal", "unequal")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description="Train on two workers of unequal speed.", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=300, help="steps of all-reduce, whose loss is the goal")
    parser.add_argument("--every", type=int, default=16, help="steps of each rank in an equal round")
    parser.add_argument("--longer", type=float, default=1.6, help="tokens of the other runs, divided by all-reduce's")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds of weights and data")
    parser.add_argument("--width", type=int, default=96, help="width of the model")
    parser.add_argument("--layers", type=int, default=3, help="layers of the model")
    parser.add_argument("--batch", type=int, default=8, help="windows per step")
    parser.add_argument("--context", type=int, default=64, help="characters per window")
    parser.add_argument("--lr", type=float, default=2.8e-3, help="peak learning rate of AdamW")
    parser.add_argument("--out", type=Path, default=Path("unequal-out"), help="folder for finished runs")
    parser.add_argument("--only", choices=KINDS, help="run only this kind")
    parser.add_argument("--record", action="store_true", help="write the table to docs/measured/outer-run.md")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Run the missing runs and print the table."""
    args = parse(argv)
    finished = record.FinishedRuns(args.out / "unequal.json")
    names = ("steps", "every", "longer", "width", "layers", "batch", "context", "lr")
    settings = {name: getattr(args, name) for name in names}
    for seed in range(args.seeds):
        for kind in KINDS if args.only is None else (args.only,):
            key = f"{kind}, seed {seed}, {settings}"
            if key not in finished.runs:
                path = args.out / "run.json"
                path.parent.mkdir(parents=True, exist_ok=True)
                launch.launch(worker, 2, settings, kind, seed, path)
                finished.put(key, json.loads(path.read_text()) | {"kind": kind, "seed": seed})
                path.unlink()
    shown = table([one for key, one in finished.runs.items() if key.endswith(f", {settings}")], settings)
    print(shown)
    if args.record:
        title = "Two workers, one at half speed"
        made_by = record.command("ch_bench.outer.unequal", argv)
        record.write("outer-run", title, made_by, shown, "2 shared cores, gloo on loopback")
    return 0


@contextmanager
def throttled(share: float) -> Iterator[str]:
    """Limit this process to a share of one core. Yields the means, ``"quota"`` or ``"sleep"``, by which it is limited."""
    group = Path("/sys/fs/cgroup/cpu", f"commhooks-{os.getpid()}")
    try:
        group.mkdir()
        (group / "cpu.cfs_period_us").write_text(str(PERIOD))
        (group / "cpu.cfs_quota_us").write_text(str(round(share * PERIOD)))
        (group / "cgroup.procs").write_text(str(os.getpid()))
    except OSError:
        yield "sleep"
        return
    try:
        yield "quota"
    finally:
        (group.parent / "cgroup.procs").write_text(str(os.getpid()))
        group.rmdir()


def worker(rank: int, world: int, device: torch.device, settings: Settings, kind: str, seed: int, path: Path) -> None:
    """Train on one rank. Rank 0 writes times, tokens and losses to ``path``."""
    data = text.load()
    torch.manual_seed(seed)
    net, twin = (make_net(settings, data.vocab) for _ in range(2))
    batches = text.Batches(data.train, settings["batch"], settings["context"], rank, seed)
    inner = adamw(net.parameters(), settings["lr"])
    if kind == "all-reduce":
        found = _all_reduce(net, inner, batches, settings)
    elif rank == 1:
        with throttled(0.5) as means:
            found = _outer(net, inner, batches, settings, kind, sleeps=means == "sleep")
            found["throttle"] = means
    else:
        found = _outer(net, inner, batches, settings, kind)
    everyone: list[Any] = [None] * world
    dist.all_gather_object(everyone, {key: value for key, value in found.items() if key != "models"})
    if rank == 0:
        held_out = text.validation(data.val, settings["context"], WINDOWS)
        rows = []
        for seconds, tokens, weights in found["models"]:
            twin.load_state_dict(weights)
            rows.append([round(seconds, 3), tokens, round(_loss(twin, held_out), 4)])
        path.write_text(json.dumps({"rows": rows, "ranks": everyone, "parameters": gpt.count_parameters(net)}))


def _per_step(settings: Settings) -> int:
    return int(settings["batch"] * settings["context"])


def _all_reduce(net: gpt.GPT, inner: torch.optim.Optimizer, batches: text.Batches, settings: Settings) -> Settings:
    """Average all gradients in each step."""
    models = []
    params = list(net.parameters())
    for step in range(1, settings["steps"] + 1):
        set_rate(inner, settings["lr"], step)
        inner.zero_grad()
        net(*batches[step]).backward()
        flat = torch.cat([p.grad.flatten() for p in params if p.grad is not None]) / 2
        dist.all_reduce(flat)
        for p, part in zip(params, flat.split([p.numel() for p in params]), strict=True):
            p.grad = part.view_as(p)
        inner.step()
        if step > settings["steps"] - 30 and step % 10 == 0:
            models.append((0.0, step * 2 * _per_step(settings), _copy(net)))
    return {"models": models}


def _outer(
    net: gpt.GPT,
    inner: torch.optim.Optimizer,
    batches: text.Batches,
    settings: Settings,
    kind: str,
    sleeps: bool = False,
) -> Settings:
    """Train between rounds until both ranks have trained on all tokens."""
    tokens = 2 * settings["every"] * _per_step(settings)  # of a round
    rounds = round(settings["longer"] * settings["steps"] / settings["every"])
    length: dict[str, Any] = {"every": settings["every"]} if kind == "equal" else {"tokens": tokens}
    optimizer = OuterOptimizer(inner, net, **length)
    models, step = [], 0
    dist.barrier()
    begun = time.perf_counter()
    while optimizer.landed < rounds:
        step, landed, started = step + 1, optimizer.landed, time.perf_counter()
        set_rate(optimizer, settings["lr"], (landed + 1) * settings["every"])
        optimizer.zero_grad()
        net(*batches[step]).backward()
        if sleeps:
            time.sleep(time.perf_counter() - started)
        optimizer.step()
        if optimizer.landed > landed:
            seconds = time.perf_counter() - begun
            workers = optimizer.report().get("workers")
            done = sum(one["work"] for one in workers) if workers else optimizer.landed * tokens
            models.append(
                (seconds, done, {name: t.clone() for name, t in zip(_names(net), _shared(optimizer), strict=True)})
            )
    optimizer.finish()
    report = optimizer.report()
    return {"models": models, "steps": step, "share": report["exchange_share"], "workers": report.get("workers")}


def _names(net: gpt.GPT) -> list[str]:
    return [name for name, _ in net.named_parameters()]


def _shared(optimizer: OuterOptimizer) -> list[torch.Tensor]:
    return [value for _, value in optimizer.shared()]


def _copy(net: gpt.GPT) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in net.named_parameters()}


@torch.no_grad()
def _loss(net: gpt.GPT, held_out: tuple[torch.Tensor, torch.Tensor]) -> float:
    x, y = held_out
    parts = zip(x.split(16), y.split(16), strict=True)
    return float(sum(net(px, py).item() * len(px) for px, py in parts)) / len(x)


# -- the table


def reached(rows: list[Row], goal: float) -> float | None:
    """Return the seconds at which the mean of three losses is at the goal, or ``None``.

    >>> reached([(1.0, 0, 3.0), (2.0, 0, 2.0), (3.0, 0, 1.0), (4.0, 0, 1.0)], 2.0)
    3.0
    """
    for end in range(3, len(rows) + 1):
        if mean(row[2] for row in rows[end - 3 : end]) <= goal:
            return rows[end - 1][0]
    return None


def at_tokens(rows: list[Row], tokens: float) -> float:
    """Return the mean of the last three losses up to a number of tokens."""
    return mean(row[2] for row in [row for row in rows if row[1] <= tokens][-3:])


def table(runs: list[dict[str, Any]], settings: Settings) -> str:
    """Return times to the goal and losses at equal tokens, by seed."""
    lines, ratios = [], []
    tokens = settings["steps"] * 2 * _per_step(settings)
    for seed in sorted({one["seed"] for one in runs}):
        by = {one["kind"]: one for one in runs if one["seed"] == seed}
        if len(by) < len(KINDS):
            continue
        goal = mean(row[2] for row in by["all-reduce"]["rows"])
        times = [reached(by[kind]["rows"], goal) for kind in KINDS[1:]]
        losses = [at_tokens(by[kind]["rows"], tokens) for kind in KINDS[1:]]
        ratio = times[1] / times[0] if times[0] and times[1] else None
        ratios += [ratio] if ratio else []
        workers = by["unequal"]["ranks"][0]["workers"]
        cells = [str(seed), f"{goal:.4f}", *(f"{t:.2f}" if t else "not reached" for t in times)]
        cells += [f"{ratio:.3f}" if ratio else "–", *(f"{loss:.4f}" for loss in losses)]
        cells += [
            " / ".join(f"{one['goodput']:.0f}" for one in workers),
            " / ".join(f"{one['missed']}" for one in workers),
        ]
        cells += [" / ".join(f"{one['busy_share']:.2f}" for one in workers)]
        lines.append(cells)
    means = {by for one in runs for rank in one["ranks"] if (by := rank.get("throttle"))}
    heads = ["seed", "goal", "equal, s", "unequal, s", "unequal / equal", "loss, equal", "loss, unequal"]
    heads += ["tokens/s of rank 0 / 1", "missed", "share of time in steps"]
    last = f"Throttle: {', '.join(sorted(means))}. Losses are at the tokens of all-reduce."
    if ratios:
        last += f" Mean of unequal / equal: {mean(ratios):.3f}."
    return f"{record.markdown_table(heads, lines)}\n\n{last}"


if __name__ == "__main__":
    record.run_main(main)
