"""Time of a step of FSDP2 with hooks on weights and gradients, compared with plain FSDP2 in bf16, on shaped links.

    sudo python -m programs.fsdp2.steps [--worlds 2 4] [--links 200mbit 1gbit] [--rounds 8] [--record]

The model is a GPT of 10.7 M parameters (width 384, 6 layers, batch 1 x 64 characters), in bf16 with AdamW. Rows take turns
step by step in one run. The slowest rank's time counts, and the ratio to plain FSDP2 is formed in each round.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import commhooks
from ch_bench import gpt, launch, record, text
from ch_bench.cost.bench import CONTEXT, HEADS, LAYERS, WIDTH
from ch_bench.links import netns
from programs.fsdp2.quality import PLAIN, ROWS

WARM_UP, LIMIT = 2, 0.55  # steps; of the time of plain FSDP2 at 200 Mbit/s
TIMED = (PLAIN, "quant8 weights", "quant8 weights, quant4 gradients")


def shard(model: gpt.GPT, device: torch.device, world: int) -> gpt.GPT:
    """Shard every block and the rest over all ranks, in bf16."""
    mesh = init_device_mesh(device.type, (world,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def worker(rank: int, world: int, device: torch.device, rounds: int, path: Path) -> None:
    """Time all rows. Rank 0 writes row -> seconds of each round to ``path``, and the bytes that the interface sent."""
    data = text.load()
    batches = text.Batches(data.train, 1, CONTEXT, rank, 0)
    models: dict[str, Any] = {}
    for row in TIMED:
        torch.manual_seed(0)
        model = shard(gpt.GPT(data.vocab, CONTEXT, WIDTH, LAYERS, HEADS).to(device), device, world)
        for axis, hook in ROWS[row].items():
            commhooks.attach(model, hook, axis=axis)
        models[row] = model, torch.optim.AdamW(model.parameters(), lr=1e-4)
    seconds: dict[str, list[float]] = {row: [] for row in TIMED}
    sent = dict.fromkeys(TIMED, 0)
    for number in range(WARM_UP + rounds):
        for row, (model, optimizer) in models.items():
            dist.barrier()
            before, begun = netns.sent_here(), time.perf_counter()
            optimizer.zero_grad()
            model(*batches[number]).backward()
            optimizer.step()
            took = time.perf_counter() - begun
            dist.barrier()
            if number >= WARM_UP:
                seconds[row].append(took)
                sent[row] += netns.sent_here().bytes - before.bytes
    flat = torch.tensor([seconds[row] for row in TIMED], dtype=torch.float64, device="cpu")  # (rows, rounds)
    dist.all_reduce(flat, op=dist.ReduceOp.MAX)
    if rank == 0:
        times = dict(zip(TIMED, flat.tolist(), strict=True))
        path.write_text(json.dumps({"seconds": times, "bytes": {row: sent[row] / rounds for row in TIMED}}))


def measure(world: int, rate: str, rounds: int) -> dict[str, Any]:
    """Return seconds and bytes of each row over links of a rate."""
    with netns.Network(world, rate) as net:
        net.verify()
        found: dict[str, Any] = launch.launch_and_read(worker, world, rounds, enter=net.enter)
        return found


def table(found: dict[str, dict[str, Any]]) -> str:
    """Return times and ratios as Markdown."""
    rows = []
    for cell, figures in found.items():
        plain = figures["seconds"][PLAIN]
        for row in TIMED:
            times = figures["seconds"][row]
            ratios = [a / b for a, b in zip(times, plain, strict=True)]
            middle, low, high = record.interval(ratios)
            limit = "200mbit" in cell and row in TIMED[2:]
            holds = f"{LIMIT}: {'holds' if middle <= LIMIT else 'MISSED'}" if limit else ""
            shown = "" if row == PLAIN else f"{middle:.2f} ({low:.2f} – {high:.2f})"
            ms, megabytes = 1e3 * statistics.median(times), figures["bytes"][row] / 1e6
            rows.append([cell, row, f"{ms:.0f}", shown, f"{megabytes:.1f}", holds])
    return record.markdown_table(["ranks, link", "hook", "ms", "to plain", "MB sent by a rank", "limit"], rows)


def main(argv: list[str] | None = None) -> int:
    """Measure all cells and print the table, or the reason why there is none."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--links", nargs="+", default=["200mbit", "1gbit"], metavar="RATE")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--out", type=Path, help="JSON file that collects the cells of several calls")
    parser.add_argument("--record", action="store_true", help="write the table to docs/measured/fsdp2-gather.md")
    args = parser.parse_args(argv)
    if reason := netns.why_not():
        print(f"skipped: {reason}", file=sys.stderr)
        return 0
    finished = record.FinishedRuns(args.out) if args.out else None
    found = finished.runs if finished is not None else {}
    for world in args.worlds:
        for rate in args.links:
            cell, figures = f"{world}, {rate}", measure(world, rate, args.rounds)
            if finished is not None:
                finished.put(cell, figures)
            else:
                found[cell] = figures
    shown = table(found)
    print(shown)
    if args.record:
        made_by = record.command("programs.fsdp2.steps", argv)
        record.write("fsdp2-gather", "Time of a step, 10.7 M parameters", made_by, shown)
    return 0


if __name__ == "__main__":
    record.run_main(main)
