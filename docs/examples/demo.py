"""Train a small GPT on real text, with one run per hook, in turns.

    python docs/examples/demo.py --hooks bf16_compress "powersgd(rank=4)" --steps 200 --nproc 2 --out demo-out
    torchrun --nproc_per_node=2 docs/examples/demo.py --hooks bf16_compress

Every hook trains a separate copy of the model, with equal weights at the start and equal data at every step. A run with
``noop``, which communicates nothing, gives the time reference. A hook's communication is its median step minus the median
``noop`` step of the same run. The demo ends with a table, ``results.json`` and ``loss.png``.
"""

import argparse
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import demo_report
import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

import commhooks
from ch_bench import gpt, launch, text, training
from ch_testing import WorkerError

DEFAULT_HOOKS = ["allreduce", "bf16_compress", "quant4", "powersgd(rank=4)", "bf16_wrapper(powersgd(rank=4))"]
NOOP_EVERY = 2  # the time reference needs a good median, and not every step


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Return the command line. With the defaults the demo ends within three minutes on two cores."""
    parser = argparse.ArgumentParser(
        description="Train a small GPT on real text, once per communication hook, and compare.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--hooks", nargs="+", default=DEFAULT_HOOKS, metavar="EXPR", help="hook expressions")
    parser.add_argument("--steps", type=int, default=250, help="training steps for every hook")
    parser.add_argument("--nproc", type=int, default=2, help="ranks to start (torchrun's own number holds there)")
    parser.add_argument("--out", type=Path, default=Path("demo-out"), help="folder for results.json and loss.png")
    parser.add_argument("--lr", type=float, default=2e-3, help="peak learning rate of AdamW")
    parser.add_argument("--batch", type=int, default=8, help="windows per rank and step")
    parser.add_argument("--context", type=int, default=64, help="characters per window")
    parser.add_argument("--width", type=int, default=128, help="width of the model")
    parser.add_argument("--layers", type=int, default=4, help="layers of the model")
    parser.add_argument(
        "--bucket-cap-mb", type=float, default=1.0, help="DDP's bucket size, which gives several buckets"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and data")
    args = parser.parse_args(argv)
    if args.steps < 4 or args.nproc < 1 or args.batch < 1 or args.width % 32:
        parser.error("legal are --steps >= 4, --nproc >= 1, --batch >= 1, and a --width that 32 divides")
    args.hooks = [hook for hook in dict.fromkeys(args.hooks) if hook != "noop"]  # noop runs anyway
    return args


def main(argv: list[str] | None = None) -> int:
    """Check the hooks' names, then start the ranks. Return 2 for a wrong name, 1 for a failed rank."""
    args = parse(argv)
    try:
        for expr in [*args.hooks, "noop"]:
            commhooks.create(expr)
    except commhooks.CommHooksError as error:
        print(error, file=sys.stderr)
        return 2
    if launch.under_torchrun():
        launch.run_here(worker, args)
        return 0
    try:
        launch.launch(worker, args.nproc, args)
    except WorkerError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def worker(rank: int, world: int, device: torch.device, args: argparse.Namespace) -> None:
    """Train all runs in turns on every rank. Rank 0 reports."""
    data = text.load()
    runs = [_start(expr, data.vocab, device, args) for expr in [*args.hooks, "noop"]]
    batches = text.Batches(data.train, args.batch, args.context, rank, args.seed)
    val_x, val_y = (t.to(device) for t in text.validation(data.val, args.context, windows=128))
    with _progress(args, rank) as advance:
        for step in range(args.steps):
            x, y = (t.to(device) for t in batches[step])
            for run in runs[step % len(runs) :] + runs[: step % len(runs)]:  # rotates the order of the models
                if run.expr != "noop" or step % NOOP_EVERY == 0:
                    _train(run, x, y, step, args)
            if (step + 1) % max(1, args.steps // 10) == 0 or step + 1 == args.steps:
                for run in runs[:-1]:
                    run.val.append((step + 1, training.evaluate(run, val_x, val_y, rank, world, args.batch)))
            advance(runs)
    _check_compressed(runs[:-1])
    seconds = training.slowest(runs, device)
    if rank == 0:
        results = _results(runs, seconds, world, device, args)
        demo_report.write(results, args.out)
        console = Console(width=None if sys.stdout.isatty() else 100)  # rich assumes that a pipe has 80 columns
        console.print(demo_report.table(results), demo_report.remarks(results, args.out), sep="\n")


def _start(expr: str, vocab: int, device: torch.device, args: argparse.Namespace) -> training.Run:
    torch.manual_seed(args.seed)  # equal weights for every hook
    net = gpt.GPT(vocab, args.context, args.width, args.layers, heads=args.width // 32)
    model = training.wrap(net, device, args.bucket_cap_mb)
    # Error feedback delivers the omitted part of a step later. A shorter second moment halves its effect on Adam.
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.01)
    return training.attach(training.Run(expr, model, optimizer))


def _train(run: training.Run, x: torch.Tensor, y: torch.Tensor, step: int, args: argparse.Namespace) -> None:
    """Run one step at the scheduled learning rate, and return its record."""
    warm = min(1.0, (step + 1) / max(1, args.steps // 10))
    cosine = 0.55 + 0.45 * math.cos(math.pi * step / args.steps)  # decays to a tenth
    for group in run.optimizer.param_groups:
        group["lr"] = args.lr * warm * cosine
    loss = training.timed_step(run, x, y)
    dist.all_reduce(loss)
    run.losses.append(loss.item() / dist.get_world_size())
    run.wire.append(run.handle.stats().get("wire_bytes", 0.0))  # a foreign hook's bytes are unknown


def _check_compressed(runs: list[training.Run]) -> None:
    """Refuse a comparison with a hook that never compressed."""
    for run in runs:
        reduction = run.handle.reduction
        if reduction is not None and reduction.lossy and run.handle.stats()["compressed_steps"] == 0:
            raise RuntimeError(f"{run.expr} compressed none of its {len(run.losses)} steps: lower its start_iter")


def _results(
    runs: list[training.Run], seconds: list[list[float]], world: int, device: torch.device, args: argparse.Namespace
) -> dict[str, Any]:
    """Return all records as plain values."""
    settings = {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()}
    return {
        "settings": settings | {"nproc": world, "device": device.type, "torch": torch.__version__},
        "parameters": gpt.count_parameters(runs[0].model),
        "hooks": [
            {
                "hook": run.expr,
                "step_seconds": times,
                "train_loss": run.losses,
                "wire_bytes": run.wire,
                "val_loss": run.val,
                "stats": run.handle.stats(),
            }
            for run, times in zip(runs, seconds, strict=True)
        ],
    }


@contextmanager
def _progress(args: argparse.Namespace, rank: int) -> Iterator[Any]:
    """A progress bar on rank 0 that redraws between steps only. A drawing thread would take time from the steps."""
    bar = Progress(
        TextColumn("[bold]{task.description}"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        auto_refresh=False,
        disable=rank != 0,
    )
    task = bar.add_task(f"{len(args.hooks)} hooks side by side", total=args.steps, loss="-")

    def advance(runs: list[training.Run]) -> None:
        newest = [run.losses[-1] for run in runs[:-1]]
        shown = f"{min(newest):.2f} … {max(newest):.2f}" if newest else "-"
        bar.update(task, advance=1, loss=shown, refresh=True)

    def tell(runs: list[training.Run]) -> None:
        """Write a line in every 50th step, because a file or a pipe shows no bar."""
        steps = len(runs[0].losses)
        if steps % 50 == 0 or steps == args.steps:
            print(
                f"step {steps} of {args.steps}: loss " + ", ".join(f"{run.losses[-1]:.2f}" for run in runs[:-1]),
                flush=True,
            )

    if not bar.console.is_terminal:
        yield tell if rank == 0 else lambda runs: None
        return
    with bar:
        yield advance


if __name__ == "__main__":
    sys.exit(main())
