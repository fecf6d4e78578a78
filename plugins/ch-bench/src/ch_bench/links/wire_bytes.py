"""The same bytes counted twice: by the engine, and by the network interface that carried them.

    sudo python -m ch_bench.links.wire_bytes [--link 200mbit] [--width 1024] [--json] [--record]

Every hook trains a few steps between network namespaces, one rank in each, so that nothing else uses the interface.
The engine counts ``wire_bytes``: what a rank sends round a ring or in a direct exchange, the status included. Two things come
on top, and are told apart here:

* Gloo puts 48 bytes before each message, and sends the same 48 alone as notices: "ready to receive", "ready to send".
  That is part of what TCP carries (*TCP*), which is the engine's count and 48 bytes times a whole number, where the engine is
  right. It also shows where the back end's algorithm is another.
* A packet has 66 bytes of headers, and an acknowledgement has nothing else. How many packets there are is the kernel's
  affair (*packets*): with segmentation offload up to 64 kB go in one, less on a link that it takes for slow, and a receiver
  acknowledges more or less often. The interface counts both (*interface*), so that they can be taken off.

There are four buckets of ``width`` x ``width`` numbers, 1 MiB each if it is 512.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from rich import box
from rich.console import Console
from rich.table import Table

from ch_bench import bench_report, launch, training
from ch_bench.links import netns

HOOKS = ["allreduce", "bf16_compress", "powersgd(rank=32)", "bf16_wrapper(powersgd(rank=32))"]
WIDTH, DEPTH, STEPS = 512, 4, 5  # as many buckets as matrices


class Counts(NamedTuple):
    """Of one rank, per step: bytes that the engine counted, that TCP carried, that the interface sent; and its packets."""

    engine: float
    stream: float
    interface: float
    packets: float


def worker(rank: int, world: int, device: torch.device, hooks: list[str], width: int, path: Path) -> None:
    """Train with each hook in turn; rank 0 leaves hook -> :class:`Counts` in ``path``."""
    counts = {}
    for expr in hooks:
        net = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(DEPTH)))
        model = training.wrap(net, device, bucket_cap_mb=4e-6 * width**2)
        run = training.attach(training.Run(expr, model, torch.optim.SGD(model.parameters(), lr=1e-3)))
        _steps(run, 2, width, device)  # DDP rebuilds its buckets and tells the others of it
        counted, before = run.handle.stats()["wire_bytes"], netns.sent_here()
        _steps(run, STEPS, width, device)
        after = netns.sent_here()
        made = (
            run.handle.stats()["wire_bytes"] - counted,
            after.stream - before.stream,
            after.bytes - before.bytes,
            after.packets - before.packets,
        )
        counts[expr] = Counts(*(figure / STEPS for figure in made))
    if rank == 0:
        path.write_text(json.dumps(counts))


def _steps(run: training.Run, steps: int, width: int, device: torch.device) -> None:
    for _ in range(steps):
        run.optimizer.zero_grad()
        run.model(torch.randn(4, width, device=device)).square().mean().backward()
        run.optimizer.step()
    dist.barrier()


def count(hooks: list[str], world: int, rate: str | None, width: int) -> dict[str, Counts]:
    """Hook -> what was counted on rank 0."""
    with tempfile.TemporaryDirectory() as folder, netns.Network(world, rate) as net:
        path = Path(folder, "counts.json")
        launch.launch(worker, world, hooks, width, path, enter=net.enter)
        return {expr: Counts(*figures) for expr, figures in json.loads(path.read_text()).items()}


def main() -> int:
    """Print both counts for each hook, or the reason why there are none."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--hooks", nargs="+", default=HOOKS, metavar="EXPR")
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--link", metavar="RATE", help="shape the uplinks, as in 200mbit; default: as fast as memory")
    parser.add_argument("--width", type=int, default=WIDTH, help="of the four square matrices")
    parser.add_argument("--record", action="store_true", help="keep the table as docs/measured/wire-bytes-DATE.md")
    parser.add_argument("--json", action="store_true", help="print hook -> [engine, TCP, interface, packets] instead")
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
    for name in ("hook", "engine", "TCP", "difference", "packets", "interface", "difference"):
        table.add_column(name, justify="left" if name == "hook" else "right")
    for expr, (engine, stream, interface, packets) in counts.items():
        apart = [f"{carried / engine - 1:+.2%}" for carried in (stream, interface)]
        table.add_row(
            expr, f"{engine:,.0f}", f"{stream:,.0f}", apart[0], f"{packets:,.0f}", f"{interface:,.0f}", apart[1]
        )
    console = Console(record=True, width=None if sys.stdout.isatty() else 110)
    console.print(table)
    if args.record:
        command = bench_report.command("ch_bench.links.wire_bytes")
        console.print(f"recorded: {bench_report.record('wire-bytes', command, console)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
