"""Time and processor time of one long all-gather over shaped links, in the ways that gloo offers.

    sudo python -m programs.fsdp2.long_gathers [--rounds N] [--record]

*whole* is gloo's own all-gather, a ring. *here* is the transport's. *broadcasts* has one broadcast from each rank into the
output. Ways take turns. A round lasts from the start of the last rank to the end of the last rank. Each way runs with ranks that
start together, and with a first or last rank that starts 50 ms after the others.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ch_bench import launch, record
from ch_bench.links import netns
from ch_core import ProcessGroupTransport

NBYTES = 8 << 20  # of the output, such as the 8-bit codes of a group of 8 M parameters
LATE = 0.05
WAYS = ("whole", "here", "broadcasts")


def ways(transport: ProcessGroupTransport, output: torch.Tensor, mine: torch.Tensor) -> dict[str, Callable[[], Any]]:
    """Return a function for each way that gathers and waits."""
    parts = output.chunk(transport.world_size)

    def broadcasts() -> None:
        parts[transport.rank].copy_(mine)
        for work in [dist.broadcast(part, src, async_op=True) for src, part in enumerate(parts)]:
            work.wait()

    return {
        "whole": lambda: dist.all_gather_into_tensor(output, mine),
        "here": lambda: transport.all_gather(output, mine).wait(None),
        "broadcasts": broadcasts,
    }


def worker(rank: int, world: int, device: torch.device, rounds: int, path: Path) -> None:
    """Time all ways. Rank 0 writes late rank -> way -> (seconds, processor seconds of a rank) of each round."""
    transport = ProcessGroupTransport()
    output = torch.empty(NBYTES, dtype=torch.uint8, device=device)
    mine = torch.ones(NBYTES // world, dtype=torch.uint8, device=device)
    found: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for late, name in ((None, "none"), (0, "first"), (world - 1, "last")):
        for number in range(1 + rounds):
            for way, gather in ways(transport, output, mine).items():
                dist.barrier()
                if rank == late:
                    time.sleep(LATE)
                spent, begun = time.process_time(), time.monotonic()  # one clock for all processes of the machine
                gather()
                ended, spent = time.monotonic(), time.process_time() - spent
                most = torch.tensor([begun, ended, spent], dtype=torch.float64, device=device)
                dist.all_reduce(most, op=dist.ReduceOp.MAX)
                if number:
                    last_begin, last_end, cpu = most.tolist()
                    found.setdefault(name, {}).setdefault(way, []).append((last_end - last_begin, cpu))
    if rank == 0:
        path.write_text(json.dumps(found))


def measure(world: int, rate: str, rounds: int) -> dict[str, Any]:
    """Return the figures over links of a rate."""
    with netns.Network(world, rate) as net:
        net.verify()
        found: dict[str, Any] = launch.launch_and_read(worker, world, rounds, enter=net.enter)
        return found


def table(found: dict[str, dict[str, Any]]) -> str:
    """Return times and ratios as Markdown."""
    rows = []
    for cell, by_late in found.items():
        for late, by_way in by_late.items():
            whole = [seconds for seconds, _ in by_way["whole"]]
            for way in WAYS:
                times = [seconds for seconds, _ in by_way[way]]
                middle, low, high = record.interval([a / b for a, b in zip(times, whole, strict=True)])
                ratio = "" if way == "whole" else f"{middle:.2f} ({low:.2f} – {high:.2f})"
                cpu = 1e3 * statistics.median(spent for _, spent in by_way[way])
                rows.append([cell, late, way, f"{1e3 * statistics.median(times):.0f}", ratio, f"{cpu:.1f}"])
    return record.markdown_table(["ranks, link", "late rank", "way", "ms", "to whole", "ms of processor"], rows)


def main(argv: list[str] | None = None) -> int:
    """Measure all cells and print the table, or the reason why there is none."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--links", nargs="+", default=["200mbit", "1gbit"], metavar="RATE")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--record", action="store_true", help="write the table to docs/measured/fsdp2-gather.md")
    args = parser.parse_args(argv)
    if reason := netns.why_not():
        print(f"skipped: {reason}", file=sys.stderr)
        return 0
    found = {f"{world}, {rate}": measure(world, rate, args.rounds) for world in args.worlds for rate in args.links}
    shown = table(found)
    print(shown)
    if args.record:
        made_by = record.command("programs.fsdp2.long_gathers", argv)
        record.write(
            "fsdp2-gather",
            "Time of a long gather",
            made_by,
            shown,
            f"gloo, output of {NBYTES / 1e6:.1f} MB, ranks in network namespaces with shaped uplinks; ways take turns",
            f"ratios with their 95 % intervals over {args.rounds} rounds",
            "processor: of the process with the most, waiting ranks included",
        )
    return 0


if __name__ == "__main__":
    record.run_main(main)
