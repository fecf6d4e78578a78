"""Bytes of FSDP2's three collectives, as the engine counts them and as the network interface does.

    sudo python -m programs.fsdp2.axis_bytes [--record]

Each collective runs alone between network namespaces: weight gathers in forwards without a backward, reduce-scatters in
backwards with weights that stay gathered, and averages of replicas in backwards of a model whose shards have one rank. The
engine counts ``wire_bytes``. The interface counts bytes and packets, so that the headers of packets can be subtracted. Gloo
adds two notices of 48 bytes to each message.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import commhooks
from ch_bench import launch, record
from ch_bench.links import netns

WIDTH, DEPTH, STEPS, LIMIT = 1024, 3, 4, 0.02
CASES = [
    ("gather", "allreduce"),
    ("gather", "bf16_compress"),
    ("gather", "quant8"),
    ("gather", "quant4"),
    ("shard", "bf16_compress(accumulate='fp32')"),
    ("shard", "quant8"),
    ("shard", "quant4"),
    ("replicate", "bf16_compress"),
    ("replicate", "quant4"),
    ("replicate", "powersgd(rank=32)"),
]


def model_for(axis: str, world: int) -> torch.nn.Module:
    """Return matrices of ``WIDTH`` x ``WIDTH`` on a mesh in which a step has traffic on this axis alone."""
    shape = (world, 1) if axis == "replicate" else (1, world)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    used = mesh if axis == "replicate" else mesh["shard"]
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH)))
    for part in model:
        fully_shard(part, mesh=used, reshard_after_forward=False)
    fully_shard(model, mesh=used, reshard_after_forward=False)
    return model


def worker(rank: int, world: int, device: torch.device, path: Path) -> None:
    """Count all cases. Rank 0 writes ``[axis, hook, engine, stream, interface, packets]`` of one step to ``path``."""
    found = []
    for axis, hook in CASES:
        model = model_for(axis, world)
        handle = commhooks.attach(model, hook, axis=axis)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        engine = stream = interface = packets = 0.0
        for step in range(1 + STEPS):
            x = torch.randn(4, WIDTH, dtype=torch.float32, device=device)
            readings = [netns.sent_here()]
            loss = model(x).square().mean()
            dist.barrier()
            readings.append(netns.sent_here())
            loss.backward()
            dist.barrier()
            readings.append(netns.sent_here())
            before, after = readings[:2] if axis == "gather" else readings[1:]
            if step:
                stream, interface = stream + after.stream - before.stream, interface + after.bytes - before.bytes
                packets += after.packets - before.packets
            else:
                engine = -handle.stats()[f"{axis}_wire_bytes"]
            optimizer.step()
            optimizer.zero_grad()
        engine += handle.stats()[f"{axis}_wire_bytes"]
        found.append([axis, hook, *(value / STEPS for value in (engine, stream, interface, packets))])
        handle.detach()
    if rank == 0:
        path.write_text(json.dumps(found))


def count(world: int) -> list[Any]:
    """Return the counts of rank 0."""
    with netns.Network(world) as net:
        found: list[Any] = launch.launch_and_read(worker, world, enter=net.enter)
        return found


def table(counts: dict[int, list[Any]]) -> str:
    """Return the counts as Markdown."""
    rows = []
    for world, found in counts.items():
        for axis, hook, engine, stream, interface, packets in found:
            off, whole = stream / engine - 1, interface / engine - 1
            holds = "holds" if abs(off) <= LIMIT else "MISSED"
            sizes = [f"{value:,.0f}" for value in (engine, stream)]
            rows.append(
                [
                    str(world),
                    axis,
                    f"`{hook}`",
                    *sizes,
                    f"{off:+.2%}",
                    holds,
                    f"{interface:,.0f}",
                    f"{whole:+.2%}",
                    f"{packets:,.0f}",
                ]
            )
    heads = ["ranks", "axis", "hook", "engine", "TCP", "difference", "2 %", "with headers", "difference", "packets"]
    return record.markdown_table(heads, rows)


def main(argv: list[str] | None = None) -> int:
    """Print the counts, or the reason why there are none."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--record", action="store_true", help="write the table to docs/measured/fsdp2-gather.md")
    args = parser.parse_args(argv)
    if reason := netns.why_not():
        print(f"skipped: {reason}", file=sys.stderr)
        return 0
    shown = table({world: count(world) for world in args.worlds})
    print(shown)
    if args.record:
        made_by = record.command("programs.fsdp2.axis_bytes", argv)
        record.write("fsdp2-gather", "Bytes of each collective", made_by, shown)
    return 0


if __name__ == "__main__":
    record.run_main(main)
