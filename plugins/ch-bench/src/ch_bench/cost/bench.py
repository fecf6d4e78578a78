"""Time hooks and PyTorch's own on one model, in turns in one run.

    commhooks bench [--link 1gbit,200mbit,80ms] [--out DIR] [--record SECTION]
    commhooks bench --model my_module:make --hooks EXPR ...

By default it times a GPT of 10.7 M parameters (width 384, 6 layers, batch 1 x 64 characters) with one thread per rank. Each
candidate has its own model in the same processes. Candidates take turns step by step, in a random order, on equal inputs.
The cost of a hook is its step minus the step of `noop`, as medians over a block of steps. Ratios of costs are formed in
each block, and their interval is a bootstrap over blocks. A claim holds if the whole interval is below its limit.

With `--model` or `--hooks` the hooks take turns in rounds on one model, yours or one of `commhooks advise`.

With `--link` the ranks are network namespaces with shaped links (needs root and iproute2): a rate, and a round trip, jitter
and loss if it has them, as in `200mbit,80ms,1% loss`. Each rate begins another link. A real transfer first shows that the
links have the requested rate and round trip.
"""

import argparse
import json
import os
import random
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console

from ch_bench import gpt, launch, record, text, training
from ch_bench.advise.predict import HOOKS
from ch_bench.advise.predict import measure as measure_steps
from ch_bench.advise.workload import check, load
from ch_bench.cost import bench_tables
from ch_bench.help_text import HelpFormatter
from ch_bench.links import netns
from ch_bench.links.link import Link
from ch_bench.pytorch_hooks import LABELS, PyTorchHook, attach_pytorch
from ch_testing import WorkerError
from commhooks import Progress

WIDTH, LAYERS, HEADS, CONTEXT = 384, 6, 6, 64
WARM_UP = 6  # steps; DDP rebuilds its buckets after the first, and PyTorch's PowerSGD compresses from the third
CAPS: dict[int, float | None] = {0: None, 1: 1000.0, 3: 14.0}  # number of buckets (0 = DDP's default) -> bucket_cap_mb


@dataclass(frozen=True)
class Candidate:
    """A hook to time: an expression, or the label of a PyTorch hook."""

    hook: str
    buckets: int = 0  # 0: DDP's default

    @property
    def label(self) -> str:
        """Name in the tables."""
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


def set_up(parser: argparse.ArgumentParser) -> Callable[[argparse.Namespace], int]:
    """Add the options of the command."""
    parser.description, parser.formatter_class = __doc__, HelpFormatter
    parser.add_argument("--blocks", metavar="N", type=int, default=15, help="blocks, one ratio each (default 15)")
    parser.add_argument(
        "--steps",
        metavar="N",
        type=int,
        default=5,
        help="steps per block and candidate, fewer on slow links (default 5)",
    )
    parser.add_argument("--nproc", metavar="N", type=int, default=2, help="number of ranks (default 2)")
    parser.add_argument(
        "--link", metavar="LINKS", default="", help="links, as in 1gbit,200mbit,80ms (default loopback)"
    )
    parser.add_argument(
        "--budget", metavar="S", type=float, default=240.0, help="time limit for each link, in seconds (default 240)"
    )
    parser.add_argument(
        "--width", metavar="N", type=int, default=WIDTH, help=f"width of the GPT; claims hold for {WIDTH}, the default"
    )
    parser.add_argument("--model", help="time this model, module:callable, as for commhooks advise")
    parser.add_argument("--hooks", nargs="+", metavar="EXPR", help="time these hooks, without PyTorch's own")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="time only these default hooks, and the baselines")
    parser.add_argument(
        "--out", metavar="DIR", type=Path, default=Path("bench-out"), help="folder of the results (default bench-out)"
    )
    parser.add_argument(
        "--record", metavar="SECTION", help="write the output to this section of docs/measured/bench.md"
    )
    return lambda args: run(_checked(args, parser))


def _checked(args: argparse.Namespace, parser: argparse.ArgumentParser) -> argparse.Namespace:
    try:
        args.links = Link.parse_all(args.link) if args.link else [None]
    except ValueError as error:
        parser.error(str(error))
    if unknown := set(args.only or ()) - {c.label for c in CANDIDATES}:
        parser.error(f"--only: unknown {sorted(unknown)}; legal are {[c.label for c in CANDIDATES]}")
    if args.blocks < 2 or args.steps < 1 or args.nproc < 2:
        parser.error("--blocks must be at least 2, --steps at least 1, --nproc at least 2")
    return args


def run(args: argparse.Namespace) -> int:
    """Measure on every link and report. Return 1 only if a rank failed; a lost claim is a result.

    Raises:
        CommHooksError: unknown model or hook.
    """
    check(args.model or "gpt", args.hooks or [])
    console = Console(record=True, width=None if sys.stdout.isatty() else 120)
    if args.link and (reason := netns.why_not(*args.links)):
        console.print(f"skipped: --link {args.link}: {reason}")
        return 0
    args.out.mkdir(parents=True, exist_ok=True)
    try:
        if args.model or args.hooks:
            measure_model(args, console)
            return 0
        results = []
        for link in args.links:
            results.append(measure(link, args))
            bench_tables.show(results[-1], console)
    except WorkerError as error:
        print(error, file=sys.stderr)
        return 1
    bench_tables.write(results, console, args.out)
    if args.record:
        made_by = record.command("commhooks bench", sys.argv[2:])
        print(f"recorded: {record.write('bench', args.record, made_by, record.printed(console))}")
    return 0


def measure(link: Link | None, args: argparse.Namespace) -> dict[str, Any]:
    """Time all candidates on one link (``None`` is loopback)."""
    load_before = os.getloadavg()[0]
    found, verified = on_link(link, args, worker)
    return {"link": link.text if link else None, "verified_bits": verified, "load_before": load_before} | found


def on_link(
    link: Link | None, args: argparse.Namespace, target: Any, *more: Any
) -> tuple[dict[str, Any], float | None]:
    """Run a worker on a link and return the JSON that its rank 0 wrote, and the verified bits per second."""
    path = args.out / f"raw-{link.filename if link else 'loopback'}.json"
    with netns.Network(args.nproc, link) if link else nullcontext() as net:
        verified = net.verify() if net else None
        launch.launch(target, args.nproc, vars(args), *more, path, enter=net.enter if net else None)
    return json.loads(path.read_text()), verified


def worker(rank: int, world: int, device: torch.device, args: dict[str, Any], path: Path) -> None:
    """Warm up, then run blocks of interleaved steps. Rank 0 writes the result to ``path``."""
    data = text.load()
    batches = text.Batches(data.train, 1, CONTEXT, rank, seed=0)
    wanted = {"noop", *bench_tables.BASELINES, *(args["only"] or ())}
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
    with Progress("bench", args["blocks"] * steps) if rank == 0 else nullcontext() as tell:
        for step in range(args["blocks"] * steps):
            if tell is not None:
                tell(f"each of {len(runs)} hooks")
            _round(runs, batches, WARM_UP + step, device)
    seconds = training.slowest(list(runs), device)
    if rank == 0:
        numel = gpt.count_parameters(runs[0].model)
        records = []
        for candidate, run, theirs, past, times in zip(candidates, runs, attached, before, seconds, strict=True):
            payload = theirs.payload(numel) if theirs else _per_step(run, past, "payload_bytes")
            wire = theirs.payload(numel) * 2 * (world - 1) / world if theirs else _per_step(run, past, "wire_bytes")
            compresses = run.expr.startswith(("powersgd", "bf16", "fp16", "quant"))
            if compresses and _per_step(run, past, "compressed_steps") != 1:
                raise RuntimeError(f"{candidate.label} did not compress every timed step: increase WARM_UP")
            blocks = [times[i : i + steps] for i in range(0, len(times), steps)]
            records.append(
                asdict(candidate) | {"label": candidate.label, "payload": payload, "wire": wire, "blocks": blocks}
            )
        path.write_text(json.dumps({"parameters": numel, "world": world, "device": str(device), "runs": records}))


def _start(
    candidate: Candidate, vocab: int, device: torch.device, width: int
) -> tuple[training.Run, PyTorchHook | None]:
    torch.manual_seed(0)
    net = gpt.GPT(vocab, CONTEXT, width, LAYERS, HEADS)
    model = training.wrap(net, device, CAPS[candidate.buckets])
    run = training.Run(candidate.hook, model, torch.optim.SGD(model.parameters(), lr=1e-3))
    if candidate.hook in LABELS:
        return run, attach_pytorch(model, candidate.hook)
    return training.attach(run), None


def _round(runs: tuple[training.Run, ...], batches: text.Batches, step: int, device: torch.device) -> None:
    """Run one step of every candidate in a random order, equal on all ranks.

    A fixed order would give each candidate the caches that the same predecessor leaves.
    """
    x, y = (t.to(device) for t in batches[step])
    for run in random.Random(step).sample(runs, len(runs)):
        training.timed_step(run, x, y)


def _check_buckets(run: training.Run, candidate: Candidate) -> None:
    sizes = run.model._get_ddp_logging_data()["rebuilt_bucket_sizes"].split(",")
    if candidate.buckets and len(sizes) != candidate.buckets and run.model.module.symbol.embedding_dim == WIDTH:
        raise RuntimeError(f"{candidate.label}: DDP made {len(sizes)} buckets; adapt CAPS")


def _fit(wanted: int, possible: float, device: torch.device) -> int:
    """Return the steps per block that fit the budget, equal on all ranks."""
    steps = torch.tensor([min(wanted, int(possible))], dtype=torch.int64, device=device)
    dist.all_reduce(steps, op=dist.ReduceOp.MIN)
    return max(1, int(steps.item()))


def _per_step(run: training.Run, past: dict[str, float], key: str) -> float:
    return float(run.handle.stats()[key] - past[key]) / len(run.seconds)


def measure_model(args: argparse.Namespace, console: Console) -> None:
    """Time hooks on any model; write ``model.json`` and, with matplotlib, ``model.png`` to ``args.out``."""
    hooks = list(dict.fromkeys(["noop", "allreduce", *(args.hooks or HOOKS)]))
    results = []
    for link in args.links:
        found, _ = on_link(link, args, model_worker, hooks)
        results.append({"link": link.text if link else "loopback", **found})
        console.print(bench_tables.model_table(results[-1]))
    (args.out / "model.json").write_text(json.dumps({"machine": record.machine(), "results": results}, indent=1))
    console.print(bench_tables.draw_model(results, args.out / "model.png"), soft_wrap=True)


def model_worker(
    rank: int, world: int, device: torch.device, args: dict[str, Any], hooks: list[str], path: Path
) -> None:
    """Time each hook in rounds. Rank 0 writes the median of every round to ``path``."""
    work = load(args["model"] or "gpt", device)
    rounds: dict[str, list[float]] = {hook: [] for hook in hooks}
    seconds = args["budget"] / len(hooks) / args["blocks"]
    with Progress("bench", args["blocks"] * len(hooks)) if rank == 0 else nullcontext() as tell:
        for block in range(args["blocks"]):
            for hook in random.Random(block).sample(hooks, len(hooks)):  # the same order on every rank
                if tell is not None:
                    tell(hook)
                rounds[hook].append(median(measure_steps(work, hook, steps=args["steps"], seconds=seconds)))
    if rank == 0:
        numel = sum(p.numel() for p in work.parameters())
        about = {"model": args["model"] or "gpt", "parameters": numel, "world": world, "device": str(device)}
        path.write_text(json.dumps({**about, "rounds": rounds}))
