"""What a hook costs, beside PyTorch's own, in one run.

    python -m ch_bench.cost.bench [--link 1gbit,200mbit] [--out DIR] [--record]

A GPT of 10.7 M parameters (width 384, 6 layers, batch 1 x 64 characters), one thread per rank, every candidate with a
model of its own, all alive in the same processes. They take turns step by step, in an order drawn anew for each step,
on equal inputs. A hook's cost is its step less the step of ``noop``, of medians over a block of steps; a ratio of costs
is formed per block, and its interval is a bootstrap over blocks. **A claim holds when the whole interval is below its
limit.**

With ``--link`` the same runs between network namespaces whose uplinks are shaped, after a real transfer has shown that
they are as slow as asked (root and iproute2; skipped with the reason elsewhere).
"""

import argparse
import json
import os
import random
import sys
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console

from ch_bench import bench_report, gpt, launch, text, training
from ch_bench.cost import any_model, peers
from ch_bench.links import netns

WIDTH, LAYERS, HEADS, CONTEXT = 384, 6, 6, 64
WARM_UP = 6  # steps: DDP rebuilds its buckets after the first, PyTorch's PowerSGD compresses from the third
CAPS: dict[int, float | None] = {0: None, 1: 1000.0, 3: 14.0}  # buckets wanted (0: DDP's default) -> bucket_cap_mb


@dataclass(frozen=True)
class Candidate:
    """Something to time: a hook expression of ours, or the name of a peer."""

    hook: str
    buckets: int = 0  # 0: whatever DDP makes of its default

    @property
    def label(self) -> str:
        """What the tables call it."""
        return self.hook + (f", {self.buckets} bucket{'s' * (self.buckets > 1)}" if self.buckets else "")


CANDIDATES = [
    Candidate("noop"),
    Candidate("allreduce"),
    Candidate("torch allreduce"),
    Candidate("bf16_compress"),
    Candidate("torch bf16"),
    Candidate("fp16_compress"),
    Candidate("torch fp16"),
    Candidate("quant8"),
    Candidate("quant4"),
    Candidate("quant4(error_feedback=True)"),
    *(c for rank in (1, 4) for c in (
        Candidate(f"powersgd(rank={rank})", 1),
        Candidate(f"powersgd(rank={rank})", 3),
        Candidate(f"torch PowerSGD rank {rank}", 1),
    )),
]  # fmt: skip


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description="Time communication hooks beside PyTorch's own.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--blocks", type=int, default=15, help="blocks, each with a ratio of its own")
    parser.add_argument("--steps", type=int, default=5, help="steps per block and candidate (fewer on slow links)")
    parser.add_argument("--nproc", type=int, default=2, help="ranks")
    parser.add_argument("--link", default="", help="comma-separated rates, as in 1gbit,200mbit; default: loopback")
    parser.add_argument("--budget", type=float, default=240.0, help="seconds per link, in which the steps must fit")
    parser.add_argument("--width", type=int, default=WIDTH, help="width of the model (384 is the claim's)")
    parser.add_argument("--model", help="time another model, module:callable; see python -m commhooks advise --help")
    parser.add_argument("--hooks", nargs="+", metavar="EXPR", help="time these hooks instead, without PyTorch's own")
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="NAME",
        help="of the hooks timed by default, these, and those they are compared with",
    )
    parser.add_argument("--out", type=Path, default=Path("bench-out"), help="folder for bench.json and bench.txt")
    parser.add_argument(
        "--record", nargs="?", const="bench", metavar="NAME", help="keep the output as docs/measured/NAME-DATE.md"
    )
    args = parser.parse_args(argv)
    try:
        args.rates = [rate for rate in args.link.split(",") if netns.parse_rate(rate)] if args.link else [None]
    except ValueError as error:
        parser.error(str(error))
    if unknown := set(args.only or ()) - {c.label for c in CANDIDATES}:
        parser.error(f"no {sorted(unknown)} in the table; there are {[c.label for c in CANDIDATES]}")
    if args.blocks < 2 or args.steps < 1 or args.nproc < 2:
        parser.error("legal are --blocks >= 2, --steps >= 1, --nproc >= 2")
    return args


def main(argv: list[str] | None = None) -> int:
    """Measure on every link, report; exit code 1 only when a rank failed (a lost claim is a result)."""
    args = parse(argv)
    console = Console(record=True, width=None if sys.stdout.isatty() else 120)
    if args.link and netns.why_not():
        console.print(f"skipped: --link {args.link}: {netns.why_not()}")
        return 0
    if args.model or args.hooks:
        return any_model.run(args, console)
    args.out.mkdir(parents=True, exist_ok=True)
    results = []
    for rate in args.rates:
        try:
            results.append(measure(rate, args))
        except launch.WorkerFailed as error:
            print(error, file=sys.stderr)
            return 1
        bench_report.show(results[-1], console)
    bench_report.write(results, console, args.out)
    if args.record:
        command = bench_report.command("ch_bench.cost.bench", argv)
        console.print(f"recorded: {bench_report.record(args.record, command, console)}")
    return 0


def measure(rate: str | None, args: argparse.Namespace) -> dict[str, Any]:
    """All candidates on one link (None: loopback): the records of `worker`, and what the link is."""
    path = args.out / f"raw-{rate or 'loopback'}.json"
    load = os.getloadavg()[0]  # before our own ranks add to it
    with netns.Network(args.nproc, rate) if rate else nullcontext() as net:
        verified = net.verify() if net else None
        launch.launch(worker, args.nproc, vars(args), path, enter=net.enter if net else None)
    measured: dict[str, Any] = json.loads(path.read_text())
    return {"link": rate, "verified_bits": verified, "load_before": load} | measured


def worker(rank: int, world: int, device: torch.device, args: dict[str, Any], path: Path) -> None:
    """One rank: warm up, then blocks of interleaved steps; rank 0 leaves the records in ``path``."""
    data = text.load()
    batches = text.Batches(data.train, 1, CONTEXT, rank, seed=0)
    wanted = {"noop", *bench_report.BASELINES, *(args["only"] or ())}
    candidates = [c for c in CANDIDATES if not args["only"] or c.label in wanted]
    runs, attached = zip(*(_start(c, data.vocab, device, args["width"]) for c in candidates), strict=True)
    for step in range(WARM_UP):
        _round(runs, batches, step, device)
        if step == 2:
            for run, candidate in zip(runs, candidates, strict=True):
                _check_buckets(run, candidate)
    fastest = [min(run.seconds[-2:]) for run in runs]
    steps = _fit(args["steps"], args["budget"] / args["blocks"] / sum(fastest), device)
    for run in runs:
        run.seconds.clear()
    before = [run.handle.stats() if run.handle else {} for run in runs]
    for step in range(args["blocks"] * steps):
        _round(runs, batches, WARM_UP + step, device)
    seconds = training.slowest(list(runs), device)
    if rank == 0:
        numel = gpt.count_parameters(runs[0].model)
        records = []
        for candidate, run, peer, past, times in zip(candidates, runs, attached, before, seconds, strict=True):
            payload = peer.payload(numel) if peer else _per_step(run, past, "payload_bytes")
            wire = peer.payload(numel) * 2 * (world - 1) / world if peer else _per_step(run, past, "wire_bytes")
            if (
                run.expr.startswith(("powersgd", "bf16", "fp16", "quant"))
                and _per_step(run, past, "compressed_steps") != 1
            ):
                raise RuntimeError(f"{candidate.label} did not compress every timed step")
            blocks = [times[i : i + steps] for i in range(0, len(times), steps)]
            records.append(
                asdict(candidate) | {"label": candidate.label, "payload": payload, "wire": wire, "blocks": blocks}
            )
        path.write_text(json.dumps({"parameters": numel, "world": world, "device": str(device), "runs": records}))


def _start(
    candidate: Candidate, vocab: int, device: torch.device, width: int
) -> tuple[training.Run, "peers.Peer | None"]:
    torch.manual_seed(0)
    net = gpt.GPT(vocab, CONTEXT, width, LAYERS, HEADS)
    model = training.wrap(net, device, CAPS[candidate.buckets])
    run = training.Run(candidate.hook, model, torch.optim.SGD(model.parameters(), lr=1e-3))
    if candidate.hook in peers.NAMES:
        return run, peers.attach(model, candidate.hook)
    return training.attach(run), None


def _round(runs: tuple[training.Run, ...], batches: text.Batches, step: int, device: torch.device) -> None:
    """One step of everybody, in an order drawn anew for each step, the same on all ranks: what runs before a candidate
    decides what it finds in the caches.
    """
    x, y = (t.to(device) for t in batches[step])
    for run in random.Random(step).sample(runs, len(runs)):
        training.timed_step(run, x, y)


def _check_buckets(run: training.Run, candidate: Candidate) -> None:
    sizes = run.model._get_ddp_logging_data()["rebuilt_bucket_sizes"].split(",")
    if candidate.buckets and len(sizes) != candidate.buckets and run.model.module.symbol.embedding_dim == WIDTH:
        raise RuntimeError(f"{candidate.label}: DDP made {len(sizes)} buckets; adapt CAPS")


def _fit(wanted: int, possible: float, device: torch.device) -> int:
    """Steps per block, the same on every rank, so that a slow link keeps to the budget."""
    steps = torch.tensor([min(wanted, int(possible))], device=device)
    dist.all_reduce(steps, op=dist.ReduceOp.MIN)
    return max(1, int(steps.item()))


def _per_step(run: training.Run, past: dict[str, float], key: str) -> float:
    return float(run.handle.stats()[key] - past[key]) / len(run.seconds)


if __name__ == "__main__":
    sys.exit(main())
