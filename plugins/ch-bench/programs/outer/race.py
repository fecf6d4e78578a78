"""Race against the clock: which method is first at the loss of all-reduce, over a slow link.

    python -m programs.outer.race --link 50mbit,200mbit,1gbit [--steps 1000] [--seeds 3] [--record]
    python -m programs.outer.race --link 50mbit,80ms

Two processes in network namespaces with shaped links (needs root and iproute2) train the demo's GPT (0.85 M parameters) on
text, with equal batches for every method. The learning rate is a warm-up followed by the inverse square root of the step.
PyTorch's all-reduce trains for ``--steps``. The goal is the mean of its last three held-out losses. Each other method trains
until it reaches the goal, or for ``--limit`` seconds; then its time is a lower bound.

**Clock**: seconds of the slower rank. It stops during evaluation, which takes place only while no message is in flight.
Evaluation uses a copy of the model, made when it was due.
**Bytes**: sent by a rank's interface while the clock runs.
**Floor**: all-reduce's number of steps times the duration of a step without communication. Both ranks take such steps at every
evaluation with a second model, so that a slow machine slows both. Utilization is the time of the same steps without
communication divided by the clock's.

From a round trip of 5 ms on, our methods are told the link (``link=``).

Every finished method is kept in ``race.json`` and does not run again.
"""

import argparse
import itertools
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import matplotlib
import torch
import torch.distributed as dist
from matplotlib.figure import Figure

from ch_bench import gpt, launch, record, text
from ch_bench.links import netns
from ch_bench.links.link import Link
from ch_testing import WorkerError
from commhooks import HookNotSupportedError
from programs.outer.methods import RACE, REFERENCE, Method, Running, start

VARIABLE = "COMMHOOKS_OUTER"
LOCAL_STEPS = 5  # steps without communication at every evaluation
WINDOWS = 128  # of held-out text
WARM = 50  # steps of the learning rate's warm-up
Record = dict[str, Any]


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description="Train until the loss of all-reduce is reached, over shaped links.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--link",
        default="50mbit,200mbit,1gbit",
        help="rates, each with a round trip if it has one, as in 50mbit,80ms,1gbit",
    )
    parser.add_argument("--steps", type=int, default=1000, help="steps of all-reduce, whose loss is the goal")
    parser.add_argument("--evaluate", type=int, default=10, help="steps between evaluations")
    parser.add_argument("--limit", type=float, default=900.0, help="seconds of the clock for each method")
    parser.add_argument("--seeds", type=int, default=1, help="number of seeds of weights and data")
    parser.add_argument("--only", nargs="+", metavar="WORD", help="methods whose name contains one of these words")
    parser.add_argument("--width", type=int, default=128, help="width of the model")
    parser.add_argument("--layers", type=int, default=4, help="layers of the model")
    parser.add_argument("--batch", type=int, default=8, help="windows per rank and step")
    parser.add_argument("--context", type=int, default=64, help="characters per window")
    parser.add_argument("--lr", type=float, default=2.8e-3, help="peak learning rate of AdamW")
    parser.add_argument("--out", type=Path, default=Path("race-out"), help="folder for race.json and plots")
    parser.add_argument("--record", action="store_true", help="write table, plots and runs to docs/measured/race.*")
    args = parser.parse_args(argv)
    try:
        args.links = Link.parse_all(args.link)
    except ValueError as error:
        parser.error(str(error))
    if args.steps < 3 * args.evaluate or args.evaluate < 1:
        parser.error("--evaluate must be at least 1, and --steps at least three times --evaluate")
    return args


def main(argv: list[str] | None = None) -> int:
    """Run the missing methods link by link and print the tables. Return 1 if a rank failed."""
    args = parse(argv)
    if reason := netns.why_not(*args.links):
        print(f"skipped: {reason}")
        return 0
    finished = record.FinishedRuns(args.out / "race.json")
    failed = 0
    for seed, link, method in itertools.product(range(args.seeds), args.links, chosen(args.only)):
        key = _key(args, link.text, seed, method)
        if key in finished.runs:
            continue
        reference = finished.runs.get(_key(args, link.text, seed, RACE[0]))
        try:
            finished.put(key, run(args, link.text, seed, method, reference["goal"] if reference else None))
        except WorkerError as error:
            print(f"{link.text}, {method.label}, seed {seed}: {error}", file=sys.stderr)
            failed = 1
            if method.label == REFERENCE:
                return 1  # without it the others have no goal
            continue
        print(line(finished.runs[key]), flush=True)
    wanted = [
        _key(args, link.text, seed, r) for seed in range(args.seeds) for link in args.links for r in chosen(args.only)
    ]
    found = [finished.runs[key] for key in wanted if key in finished.runs]
    shown = tables(found)
    print(shown)
    pictures = draw(found, record.measured() if args.record else args.out)
    if args.record:
        (record.measured() / "race.json").write_text(record.json_lines(found))
        body = "\n\n".join(["<!-- tables -->", shown, *(f"![{path.stem}]({path.name})" for path in pictures)])
        title = "Seconds to the loss of all-reduce over slow links"
        record.write("race", title, record.command("programs.outer.race", argv), body, "raw records: race.json")
    return failed


def chosen(only: list[str] | None) -> list[Method]:
    """Return the methods, reference first. A complete name selects only the method of that name."""
    labels = {r.label for r in RACE}
    return [
        r
        for r in RACE
        if r.label == REFERENCE
        or not only
        or any(word == r.label if word in labels else word in r.label for word in only)
    ]


def _key(args: argparse.Namespace, link: str, seed: int, method: Method) -> str:
    model = f"{args.width}x{args.layers}, {args.batch}x{args.context}, lr {args.lr:g}"
    limit = "" if method.label == REFERENCE else f", limit {args.limit:g}"
    steps = f"{args.steps} steps by {args.evaluate}, {LOCAL_STEPS} local"
    return f"{link}, {model}, {steps}, seed {seed}{limit}: {method.label}"


def run(args: argparse.Namespace, link: str, seed: int, method: Method, goal: float | None) -> Record:
    """Run one method on one link and return its record. ``goal`` is ``None`` for the reference, which sets it."""
    if method.expression and VARIABLE not in os.environ:
        # All ranks of a process are forked from one server, which reads the variable when it starts.
        with (
            variable(VARIABLE, method.expression),
            ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool,
        ):
            return pool.submit(run, args, link, seed, method, goal).result()
    path = args.out / "run.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    names = ("steps", "evaluate", "limit", "width", "layers", "batch", "context", "lr")
    settings = {name: getattr(args, name) for name in names}
    with netns.Network(2, link) as net:
        verified = net.verify()
        launch.launch(worker, 2, settings, method.as_dict(), Link.parse(link).told, seed, goal, path, enter=net.enter)
    found: Record = json.loads(path.read_text())
    path.unlink()
    head = {"link": link, "verified_bits": round(verified), "seed": seed, "label": method.label, "settings": settings}
    return head | found


@contextmanager
def variable(name: str, value: str) -> Iterator[None]:
    """Set an environment variable for processes that start inside."""
    os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name, None)


def worker(
    rank: int,
    world: int,
    device: torch.device,
    settings: dict[str, Any],
    fields: Record,
    link: str | None,
    seed: int,
    goal: float | None,
    path: Path,
) -> None:
    """Train one method on one rank. Rank 0 writes the record to ``path``."""
    method = Method(**fields)
    data = text.load()
    torch.manual_seed(seed)
    net = make_net(settings, data.vocab)
    make = partial(adamw, lr=settings["lr"])
    racer = _Racer(
        start(method, net.to(device), make, link),
        text.Batches(data.train, settings["batch"], settings["context"], rank, seed),
    )
    twin = make_net(settings, data.vocab).to(device)
    local = _Racer(Running(twin, make(twin.parameters())), racer.batches)  # steps without communication
    held_out = text.validation(data.val, settings["context"], WINDOWS)
    rows: list[tuple[int, float, float, float]] = []  # steps, seconds, bytes, held-out loss
    waiting: list[tuple[int, float, float, dict[str, torch.Tensor]]] = []
    last = settings["steps"] if goal is None else 1 << 30
    arrived = False
    dist.barrier()
    for step in range(1, last + 1):
        racer.step(step, settings["lr"] * method.inner)
        if step % settings["evaluate"] == 0:
            waiting.append((step, racer.seconds, racer.sent, racer.running.snapshot()))
        if waiting and racer.running.safe:
            for at, seconds, sent, weights in waiting:
                twin.load_state_dict(weights)
                rows.append((at, *_evaluate(twin, held_out, seconds, sent, rank, world)))
            waiting.clear()
            dist.barrier()
            for _ in range(LOCAL_STEPS):
                local.step(step, settings["lr"])
            dist.barrier()  # both clocks resume at the same time
            arrived = goal is not None and any(_mean_of_three(rows[:end]) <= goal for end in range(3, len(rows) + 1))
            if arrived or (goal is not None and rows[-1][1] > settings["limit"]):
                break
    if method.by_run and racer.running.model.require_backward_grad_sync:
        raise HookNotSupportedError("the outer optimizer was not attached: is commhooks-hook.pth installed?")
    local_step = torch.tensor(local.seconds / local.steps, dtype=torch.float64, device="cpu")
    dist.all_reduce(local_step, dist.ReduceOp.MAX)
    if rank == 0:
        found = {
            "goal": _mean_of_three(rows) if goal is None and rows else goal,
            "arrived": goal is None or arrived,
            "rows": [[at, round(s, 2), round(sent), round(loss, 4)] for at, s, sent, loss in rows],
            "local_step_seconds": round(local_step.item(), 5),
            "parameters": gpt.count_parameters(net),
            "when": time.strftime("%Y-%m-%d"),
        }
        path.write_text(json.dumps(found))


def make_net(settings: dict[str, Any], vocab: int) -> gpt.GPT:
    """Return the GPT of a run's settings ``width``, ``layers`` and ``context``."""
    width = settings["width"]
    return gpt.GPT(vocab, settings["context"], width, settings["layers"], heads=max(1, width // 32))


def adamw(params: Iterable[torch.Tensor], lr: float) -> torch.optim.AdamW:
    """Return the inner optimizer."""
    return torch.optim.AdamW(params, lr=lr, betas=(0.9, 0.95), weight_decay=0.01)


def set_rate(optimizer: torch.optim.Optimizer, lr: float, step: float) -> None:
    """Set the learning rate of a step, counted from 1: a warm-up, then the inverse square root of the step.

    >>> optimizer = adamw([torch.zeros(1)], 1.0)
    >>> set_rate(optimizer, 0.5, 200)
    >>> optimizer.param_groups[0]["lr"]
    0.25
    """
    for group in optimizer.param_groups:
        group["lr"] = lr * min(step / WARM, (WARM / step) ** 0.5)


class _Racer:
    """A method with its clock, which counts seconds and bytes only during steps."""

    def __init__(self, running: Running, batches: text.Batches) -> None:
        self.running, self.batches = running, batches
        self.steps, self.seconds, self.sent = 0, 0.0, 0.0

    def step(self, step: int, lr: float) -> None:
        """Take one step at the scheduled learning rate."""
        x, y = self.batches[step]
        optimizer = self.running.optimizer
        set_rate(optimizer, lr, step)
        sent, begun = netns.sent_here().bytes, time.perf_counter()
        optimizer.zero_grad()
        self.running.model(x, y).backward()
        optimizer.step()
        self.seconds += time.perf_counter() - begun
        self.sent += netns.sent_here().bytes - sent
        self.steps += 1


@torch.no_grad()
def _evaluate(
    net: torch.nn.Module,
    held_out: tuple[torch.Tensor, torch.Tensor],
    seconds: float,
    sent: float,
    rank: int,
    world: int,
) -> tuple[float, float, float]:
    """Return seconds and bytes of the slower rank, and the held-out loss; each rank computes a part of it."""
    x, y = (one[rank::world] for one in held_out)
    clock = torch.tensor([seconds, sent], dtype=torch.float64, device="cpu")
    loss = torch.zeros(1, dtype=torch.float64, device="cpu")
    for part_x, part_y in zip(x.split(16), y.split(16), strict=True):
        loss += net(part_x, part_y) * len(part_x)
    dist.all_reduce(clock, dist.ReduceOp.MAX)
    dist.all_reduce(loss)
    return clock[0].item(), clock[1].item(), loss.item() / len(held_out[0])


def _mean_of_three(rows: list[tuple[int, float, float, float]]) -> float:
    return statistics.mean(row[3] for row in rows[-3:])


# -- tables and plots


def line(one: Record) -> str:
    """Return a finished method as one line."""
    head = f"{one['link']}, seed {one['seed']}, {one['label']}"
    steps, seconds, sent, _ = one["rows"][-1]
    verb = "" if one["arrived"] else "did not arrive, "
    alone = f"{1000 * one['local_step_seconds']:.1f} ms a step alone"
    return f"{head}: {verb}{seconds:.1f} s, {steps} steps, {sent / 1e6:.1f} MB, {alone}"


def _by_label(found: list[Record], link: str) -> dict[str, list[Record]]:
    made: dict[str, list[Record]] = {}
    for one in found:
        if one["link"] == link:
            made.setdefault(one["label"], []).append(one)
    return made


def tables(found: list[Record]) -> str:
    """Return a Markdown table for each link."""
    return "\n\n".join(_table(_by_label(found, link), link) for link in dict.fromkeys(one["link"] for one in found))


def _table(runs: dict[str, list[Record]], link: str) -> str:
    if REFERENCE not in runs:
        return f"{link}: {REFERENCE} is not finished"
    per_step = mean(one["local_step_seconds"] for records in runs.values() for one in records)
    needed = mean(one["rows"][-1][0] for one in runs[REFERENCE])
    goals = ", ".join(f"{one['goal']:.4f}" for one in runs[REFERENCE])
    verified = mean(one["verified_bits"] for one in runs[REFERENCE]) / 1e6
    lines = [
        f"**{link}** ({verified:.0f} Mbit/s arrived in a plain transfer), goal {goals} nats, "
        f"{1000 * per_step:.1f} ms a step without communication, floor {per_step * needed:.1f} s",
        "",
        "| method | seeds | seconds | × floor | sooner than DDP | steps | MB sent | utilization |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    ddp = mean(one["rows"][-1][1] for one in runs[REFERENCE])
    body = []
    for label, records in runs.items():
        steps, seconds, sent = (mean(one["rows"][-1][i] for one in records) for i in range(3))
        more = "" if all(one["arrived"] for one in records) else "> "  # a lower bound if a run did not arrive
        less = "< " if more else ""
        # Each run's own local steps: the machine's speed changes between runs.
        over = mean(one["rows"][-1][1] / (one["local_step_seconds"] * needed) for one in records)
        used = mean(one["rows"][-1][0] * one["local_step_seconds"] / one["rows"][-1][1] for one in records)
        cells = [label, str(len(records)), f"{more}{seconds:.1f}", f"{more}{over:.2f}"]
        cells += [f"{less}{ddp / seconds:.2f} ×", f"{more}{steps:.0f}", f"{more}{sent / 1e6:.1f}"]
        body.append((bool(more), seconds, [*cells, f"{100 * used:.0f} %"]))
    return "\n".join(lines + [f"| {' | '.join(cells)} |" for _, _, cells in sorted(body)])


def draw(found: list[Record], folder: Path) -> list[Path]:
    """Plot held-out loss against seconds of the first seed, one file for each link."""
    made = []
    for link in dict.fromkeys(one["link"] for one in found):
        runs = {label: records[0] for label, records in _by_label(found, link).items()}
        if REFERENCE not in runs:
            continue
        with matplotlib.rc_context({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}):
            figure = Figure(figsize=(9, 6.5), layout="constrained")
            axes = figure.subplots()
            losses = [row[3] for row in runs[REFERENCE]["rows"]]
            times = [row[0] * runs[REFERENCE]["local_step_seconds"] for row in runs[REFERENCE]["rows"]]
            axes.plot(times, losses, color="#000000", linestyle="--", label="floor")
            for number, (label, one) in enumerate(sorted(runs.items(), key=lambda item: item[1]["rows"][-1:])):
                style = "-" if not label.startswith("torch") else ":"
                rows = one["rows"]
                axes.plot([r[1] for r in rows], [r[3] for r in rows], style, color=f"C{number % 10}", label=label)
            axes.axhline(runs[REFERENCE]["goal"], color="#999999", linewidth=0.8)
            axes.set(xscale="log", xlabel=f"seconds at {link}", ylabel="held-out loss, nats")
            figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=7)
            made.append(folder / f"race-{Link.parse(link).filename}.png")
            figure.savefig(made[-1], dpi=110)
    return made


if __name__ == "__main__":
    record.run_main(main)
