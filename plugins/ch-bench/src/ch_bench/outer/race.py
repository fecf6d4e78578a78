"""The race against the clock: who is first at the loss that all-reduce has after so many steps, over a slow link.

    python -m ch_bench.outer.race --link 50mbit,200mbit,1gbit [--steps 1000] [--seeds 3] [--record]

The demo's GPT (0.85 M parameters) on real text, two processes between network namespaces whose uplinks are shaped (root and
iproute2), equal batches for all. The learning rate has no horizon: a warm-up, then the inverse root of the step. PyTorch's
all-reduce trains for ``--steps``; the mean of its last three held-out evaluations is what each other method trains until
it reaches, or until ``--limit`` seconds: then its time is a lower bound.

**The clock** stands still while held-out text is evaluated, and only at places where no message is under way, so that no
method's messages travel for nothing; what is evaluated was copied when it was due, off the clock. Seconds are those of the slower
rank.
**Bytes** are what a rank's interface has sent while the clock ran. **The floor** is all-reduce's number of steps at the speed of
a step without communication, by the same clock: the mean of the slower rank. Utilization is the time of the same steps at
that speed over the clock's. Both ranks take such steps at every evaluation, with another model of the same kind: a machine
that is slower for a while is so for both.

Every finished method is in ``race.json`` at once, and is not run again.
"""

import argparse
import itertools
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ch_bench import gpt, launch, text
from ch_bench.links import netns
from ch_bench.outer import race_report
from ch_bench.outer.method import Method
from ch_bench.outer.race_methods import METHODS, REFERENCE, Running, start

WINDOWS = 128  # of held-out text
LOCAL_STEPS = 5  # without communication, at every evaluation
WARM = 50  # steps of the learning rate's warm-up
Record = dict[str, Any]


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description="Train until the loss of all-reduce is reached, over shaped links.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--link", default="50mbit,200mbit,1gbit", help="comma-separated rates")
    parser.add_argument("--steps", type=int, default=1000, help="of all-reduce, whose loss is the goal")
    parser.add_argument("--evaluate", type=int, default=10, help="steps between evaluations")
    parser.add_argument("--limit", type=float, default=900.0, help="seconds of the clock for every method")
    parser.add_argument("--seeds", type=int, default=1, help="seeds of weights and data")
    parser.add_argument(
        "--only", nargs="+", metavar="WORD", help="methods whose name has one of these, and what they need"
    )
    parser.add_argument("--width", type=int, default=128, help="width of the model")
    parser.add_argument("--layers", type=int, default=4, help="layers of the model")
    parser.add_argument("--batch", type=int, default=8, help="windows per rank and step")
    parser.add_argument("--context", type=int, default=64, help="characters per window")
    parser.add_argument("--lr", type=float, default=2.8e-3, help="peak learning rate of AdamW")
    parser.add_argument(
        "--out", type=Path, default=Path("race-out"), help="folder for race.json, the table and the plots"
    )
    parser.add_argument(
        "--record",
        nargs="?",
        const="race",
        metavar="NAME",
        help="keep table, plots and runs as docs/measured/NAME-DATE",
    )
    args = parser.parse_args(argv)
    try:
        args.rates = [rate for rate in args.link.split(",") if netns.parse_rate(rate)]
    except ValueError as error:
        parser.error(str(error))
    if args.steps < 3 * args.evaluate or args.evaluate < 1:
        parser.error("legal are --evaluate >= 1 and --steps of at least three evaluations")
    return args


def main(argv: list[str] | None = None) -> int:
    """Run who is missing, link by link, and show the tables; exit code 1 if a rank failed."""
    args = parse(argv)
    if reason := netns.why_not():
        print(f"skipped: {reason}")
        return 0
    path = args.out / "race.json"
    records: dict[str, Record] = json.loads(path.read_text()) if path.exists() else {}
    failed = 0
    for seed, rate, method in itertools.product(range(args.seeds), args.rates, chosen(args.only)):
        key = _key(args, rate, seed, method)
        if key in records:
            continue
        reference = records.get(_key(args, rate, seed, METHODS[0]))
        try:
            records[key] = run(args, rate, seed, method, reference["goal"] if reference else None)
        except launch.WorkerFailed as error:
            print(f"{rate}, {method.label}, seed {seed}: {error}", file=sys.stderr)
            failed = 1
            if method.label == REFERENCE:
                return 1  # nothing to compare the others with
            continue
        _write(path, records)
        print(race_report.line(records[key]), flush=True)
    wanted = [_key(args, rate, seed, r) for seed in range(args.seeds) for rate in args.rates for r in chosen(args.only)]
    found = [records[key] for key in wanted if key in records]
    print(race_report.tables(found))
    race_report.draw(found, args.out)
    if args.record:
        race_report.record(found, args.record, sys.argv[1:] if argv is None else argv)
    return failed


def chosen(only: list[str] | None) -> list[Method]:
    """The methods, those first that the others are measured by. A whole name takes no other that has it as a part."""
    labels = {r.label for r in METHODS}
    return [
        r
        for r in METHODS
        if r.label == REFERENCE
        or not only
        or any(word == r.label if word in labels else word in r.label for word in only)
    ]


def _key(args: argparse.Namespace, rate: str, seed: int, method: Method) -> str:
    model = f"{args.width}x{args.layers}, {args.batch}x{args.context}, lr {args.lr:g}"
    limit = "" if method.label == REFERENCE else f", limit {args.limit:g}"
    steps = f"{args.steps} steps by {args.evaluate}, {LOCAL_STEPS} local"
    return f"{rate}, {model}, {steps}, seed {seed}{limit}: {method.label}"


def _write(path: Path, records: dict[str, Record]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".new")
    beside.write_text(json.dumps(records, indent=0) + "\n")
    beside.replace(path)


def run(args: argparse.Namespace, rate: str, seed: int, method: Method, goal: float | None) -> Record:
    """One method on one link: its record. ``goal`` is ``None`` for all-reduce, which sets it."""
    beside = args.out / "run.json"
    beside.parent.mkdir(parents=True, exist_ok=True)
    settings = {
        k: getattr(args, k) for k in ("steps", "evaluate", "limit", "width", "layers", "batch", "context", "lr")
    }
    with netns.Network(2, rate) as net:
        verified = net.verify()
        launch.launch(worker, 2, settings, method.as_dict(), seed, goal, beside, enter=net.enter)
    record: Record = json.loads(beside.read_text())
    beside.unlink()
    return {"link": rate, "verified_bits": verified, "seed": seed, "label": method.label, "settings": settings} | record


def worker(
    rank: int,
    world: int,
    device: torch.device,
    settings: dict[str, Any],
    who: Record,
    seed: int,
    goal: float | None,
    path: Path,
) -> None:
    """One rank of one method; rank 0 leaves the record in ``path``."""
    method = Method(**who)
    data = text.load()
    torch.manual_seed(seed)
    net = _net(settings, data.vocab)
    make = _optimizer(settings["lr"])
    race = _Race(
        start(method, net.to(device), make),
        text.Batches(data.train, settings["batch"], settings["context"], rank, seed),
    )
    twin = _net(settings, data.vocab).to(device)
    beside = _Race(Running(twin, make(twin.parameters())), race.batches)  # steps without communication
    held = text.validation(data.val, settings["context"], WINDOWS)
    rows: list[tuple[int, float, float, float]] = []  # steps, seconds, bytes, held-out
    waiting: list[tuple[int, float, float, dict[str, torch.Tensor]]] = []
    last = settings["steps"] if goal is None else 1 << 30
    arrived = False
    dist.barrier()
    for step in range(1, last + 1):
        race.step(step, settings["lr"] * method.inner)
        if step % settings["evaluate"] == 0:
            waiting.append((step, race.seconds, race.sent, race.running.snapshot()))
        if waiting and race.running.safe:
            for at, seconds, sent, weights in waiting:
                twin.load_state_dict(weights)
                rows.append((at, *_together(twin, held, seconds, sent, rank, world)))
            waiting.clear()
            dist.barrier()
            for _ in range(LOCAL_STEPS):
                beside.step(step, settings["lr"])
            dist.barrier()  # the clock goes on on both ranks at once
            arrived = goal is not None and any(_mean_of_three(rows[:end]) <= goal for end in range(3, len(rows) + 1))
            if arrived or (goal is not None and rows[-1][1] > settings["limit"]):
                break
    local = torch.tensor(beside.seconds / beside.steps, dtype=torch.float64)
    dist.all_reduce(local, dist.ReduceOp.MAX)
    if rank == 0:
        found = {
            "goal": _mean_of_three(rows) if goal is None and rows else goal,
            "arrived": goal is None or arrived,
            "rows": [[at, round(s, 4), sent, round(loss, 5)] for at, s, sent, loss in rows],
            "local_step_seconds": local.item(),
            "parameters": gpt.count_parameters(net),
            "when": time.strftime("%Y-%m-%d"),
        }
        path.write_text(json.dumps(found))


class _Race:
    """A method and its clock: seconds and bytes count while it steps, and not in between."""

    def __init__(self, running: Running, batches: text.Batches) -> None:
        self.running, self.batches = running, batches
        self.steps, self.seconds, self.sent = 0, 0.0, 0.0

    def step(self, step: int, lr: float) -> None:
        """One step at the scheduled learning rate."""
        x, y = self.batches[step]
        optimizer = self.running.optimizer
        for group in optimizer.param_groups:
            group["lr"] = lr * min(step / WARM, (WARM / step) ** 0.5)
        sent, begun = netns.sent_here().bytes, time.perf_counter()
        optimizer.zero_grad()
        self.running.model(x, y).backward()
        optimizer.step()
        self.seconds += time.perf_counter() - begun
        self.sent += netns.sent_here().bytes - sent
        self.steps += 1


def _net(settings: dict[str, Any], vocab: int) -> gpt.GPT:
    width = settings["width"]
    return gpt.GPT(vocab, settings["context"], width, settings["layers"], heads=max(1, width // 32))


def _optimizer(lr: float) -> Any:
    return lambda params: torch.optim.AdamW(params, lr=lr, betas=(0.9, 0.95), weight_decay=0.01)


@torch.no_grad()
def _together(
    net: torch.nn.Module, held: tuple[torch.Tensor, torch.Tensor], seconds: float, sent: float, rank: int, world: int
) -> tuple[float, float, float]:
    """Seconds and bytes of the slower rank, and the held-out loss, of which each rank computes a part."""
    x, y = (one[rank::world] for one in held)
    clock = torch.tensor([seconds, sent], dtype=torch.float64)
    loss = torch.zeros(1, dtype=torch.float64)
    for part_x, part_y in zip(x.split(16), y.split(16), strict=True):
        loss += net(part_x, part_y) * len(part_x)
    dist.all_reduce(clock, dist.ReduceOp.MAX)
    dist.all_reduce(loss)
    return clock[0].item(), clock[1].item(), loss.item() / len(held[0])


def _mean_of_three(rows: list[tuple[int, float, float, float]]) -> float:
    return statistics.mean(row[3] for row in rows[-3:])


if __name__ == "__main__":
    sys.exit(main())
