"""Bytes counted by the engine compared with bytes counted by the network interface.

    sudo python -m programs.links.wire_bytes [--link 200mbit] [--width 1024] [--json] [--record]

Every hook trains a few steps between network namespaces with one rank each, so that no other program uses the interface. The
engine counts ``wire_bytes``: bytes that a rank sends round a ring or in a direct exchange, with the status. Two kinds of bytes
are added below the engine:

* Gloo sends 48 bytes before each message, and the same 48 bytes as notices ("ready to receive", "ready to send"). If the
  engine is right, the bytes that TCP carries (*TCP*) are the engine's count plus a multiple of 48.
* Each packet has 66 bytes of headers, acknowledgements included. The kernel chooses the number of packets: with segmentation
  offload one packet carries up to 64 kB. The interface counts bytes and packets, so that headers can be subtracted.

There are four buckets of ``width`` x ``width`` numbers, 1 MiB each if the width is 512.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from ch_bench import launch, record, training
from ch_bench.links import netns
from ch_bench.pytorch_hooks import reduction_of

HOOKS = ["allreduce", "bf16_compress", "powersgd(rank=32)", "bf16_wrapper(powersgd(rank=32))"]
WIDTH, DEPTH, STEPS = 512, 4, 5  # as many buckets as matrices


class Counts(NamedTuple):
    """Bytes of one rank and step, as the engine, TCP and the interface count them, and packets."""

    engine: float
    stream: float
    interface: float
    packets: float


def worker(rank: int, world: int, device: torch.device, hooks: list[str], width: int, path: Path) -> None:
    """Train with each hook in turn. Rank 0 writes hook -> :class:`Counts` to ``path``."""
    counts = {}
    for expr in hooks:
        net = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(DEPTH)))
        model = training.wrap(net, device, bucket_cap_mb=4e-6 * width**2)
        run = training.attach(training.Run(expr, model, torch.optim.SGD(model.parameters(), lr=1e-3)))
        _steps(run, 2, width, device)  # DDP rebuilds its buckets, which sends messages
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
        run.model(torch.randn(4, width, dtype=torch.float32, device=device)).square().mean().backward()
        run.optimizer.step()
    dist.barrier()


def count(hooks: list[str], world: int, rate: str | None, width: int) -> dict[str, Counts]:
    """Return hook -> counts of rank 0."""
    with netns.Network(world, rate) as net:
        found = launch.launch_and_read(worker, world, hooks, width, enter=net.enter)
    return {expr: Counts(*figures) for expr, figures in found.items()}


def table(counts: dict[str, Counts]) -> str:
    """Return the counts as Markdown."""
    rows = []
    for hook, (engine, stream, interface, packets) in counts.items():
        tcp, whole = (f"{carried / engine - 1:+.2%}" for carried in (stream, interface))
        rows.append(
            [f"`{hook}`", f"{engine:,.0f}", f"{stream:,.0f}", tcp, f"{packets:,.0f}", f"{interface:,.0f}", whole]
        )
    return record.markdown_table(["hook", "engine", "TCP", "difference", "packets", "interface", "difference"], rows)


def main(argv: list[str] | None = None) -> int:
    """Print the counts of each hook, or the reason why there are none."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hooks", nargs="+", default=HOOKS, metavar="EXPR")
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--link", metavar="RATE", help="rate of the uplinks, as in 200mbit; default: as fast as memory")
    parser.add_argument("--width", type=int, default=WIDTH, help="width of the four square matrices")
    parser.add_argument("--record", action="store_true", help="write the table to docs/measured/wire-bytes.md")
    parser.add_argument("--json", action="store_true", help="print hook -> [engine, TCP, interface, packets] instead")
    args = parser.parse_args(argv)
    for hook in args.hooks:
        reduction_of(hook)
    if reason := netns.why_not():
        print(f"skipped: {reason}", file=sys.stderr)
        return 0
    counts = count(args.hooks, args.nproc, args.link, args.width)
    if args.json:
        print(json.dumps(counts))
        return 0
    size = f"buckets of {4e-6 * args.width**2:.1f} MB"
    found = f"Bytes per rank and step, {args.nproc} ranks, {args.link or 'no'} limit, {size}\n\n{table(counts)}"
    print(found)
    if args.record:
        made_by = record.command("programs.links.wire_bytes", argv)
        record.write("wire-bytes", "Process groups on shaped links", made_by, found)
    return 0


if __name__ == "__main__":
    record.run_main(main)
