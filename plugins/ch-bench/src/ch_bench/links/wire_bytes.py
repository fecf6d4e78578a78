"""The same bytes counted twice: by the engine, and by the network interface that carried them.

    sudo python -m ch_bench.links.wire_bytes [--link 200mbit] [--width 1024] [--json] [--record]

Every hook trains a few steps between network namespaces, one rank in each, so that nothing else uses the interface.
The engine counts ``wire_bytes``: what a rank sends round a ring or in a direct exchange, the status included. The interface
counts packets, so that headers, Gloo's notices that a buffer is ready, and acknowledgements of what arrives come on top: about
1 kB a message, whatever its size, and 0.2 % of large ones, with segmentation offload. It also shows where the back end's
algorithm is another. There are four buckets of ``width`` x ``width`` numbers, 1 MiB each if it is 512.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from rich import box
from rich.console import Console
from rich.table import Table

from ch_bench import bench_report, launch, training
from ch_bench.links import netns

HOOKS = ["allreduce", "bf16_compress", "powersgd(rank=32)", "bf16_wrapper(powersgd(rank=32))"]
WIDTH, DEPTH, STEPS = 512, 4, 5  # as many buckets as matrices


def worker(rank: int, world: int, device: torch.device, hooks: list[str], width: int, path: Path) -> None:
    """Train with each hook in turn; rank 0 leaves hook -> (counted, carried) in ``path``, in bytes per step."""
    counts = {}
    for expr in hooks:
        net = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(DEPTH)))
        model = training.wrap(net, device, bucket_cap_mb=4e-6 * width**2)
        run = training.attach(training.Run(expr, model, torch.optim.SGD(model.parameters(), lr=1e-3)))
        _steps(run, 2, width, device)  # DDP rebuilds its buckets and tells the others of it
        counted, carried = run.handle.stats()["wire_bytes"], netns.sent_here()
        _steps(run, STEPS, width, device)
        counts[expr] = (
            (run.handle.stats()["wire_bytes"] - counted) / STEPS,
            (netns.sent_here() - carried) / STEPS,
        )
    if rank == 0:
        path.write_text(json.dumps(counts))


def _steps(run: training.Run, steps: int, width: int, device: torch.device) -> None:
    for _ in range(steps):
        run.optimizer.zero_grad()
        run.model(torch.randn(4, width, device=device)).square().mean().backward()
        run.optimizer.step()
    dist.barrier()


def count(hooks: list[str], world: int, rate: str | None, width: int) -> dict[str, tuple[float, float]]:
    """Hook -> (bytes per step that the engine counted, bytes per step that the interface carried) on rank 0."""
    with tempfile.TemporaryDirectory() as folder, netns.Network(world, rate) as net:
        path = Path(folder, "counts.json")
        launch.launch(worker, world, hooks, width, path, enter=net.enter)
        return {expr: (counted, carried) for expr, (counted, carried) in json.loads(path.read_text()).items()}


def main() -> int:
    """Print both counts for each hook, or the reason why there are none."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--hooks", nargs="+", default=HOOKS, metavar="EXPR")
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--link", metavar="RATE", help="shape the uplinks, as in 200mbit; default: as fast as memory")
    parser.add_argument("--width", type=int, default=WIDTH, help="of the four square matrices")
    parser.add_argument("--record", action="store_true", help="keep the table as docs/measured/wire-bytes-DATE.md")
    parser.add_argument("--json", action="store_true", help="print hook -> [counted, carried] instead of a table")
    args = parser.parse_args()
    if reason := netns.why_not():
        print(f"skipped: {reason}", file=sys.stderr)
        return 0
    counts = count(args.hooks, args.nproc, args.link, args.width)
    if args.json:
        print(json.dumps(counts))
        return 0
    title = f"Bytes per rank and step, {args.nproc} ranks, {args.link or 'no'} limit, buckets of {4e-6 * args.width**2:.1f} MB"
    table = Table(title=title, box=box.SIMPLE_HEAD)
    for name in ("hook", "engine", "interface", "difference"):
        table.add_column(name, justify="left" if name == "hook" else "right")
    for expr, (counted, carried) in counts.items():
        table.add_row(expr, f"{counted:,.0f}", f"{carried:,.0f}", f"{carried / counted - 1:+.2%}")
    console = Console(record=True, width=None if sys.stdout.isatty() else 100)
    console.print(table)
    if args.record:
        command = bench_report.command("ch_bench.links.wire_bytes")
        console.print(f"recorded: {bench_report.record('wire-bytes', command, console)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
