"""FSDP2 inside the node and compression between nodes, with 2 shards x 2 replicas on this machine.

    python docs/examples/fsdp2_hsdp.py [HOOK ...] [--steps 300] [--seeds 3] [--record]

Pairs of ranks ("inside the node") shard a small GPT, as PyTorch's HSDP does, and the pairs are replicas. commhooks reduces
between the two replicas of each shard. Every hook starts from the same weights and sees the same text. The program prints the
bytes that rank 0 sends per step on each axis, in a bandwidth-optimal collective, and the held-out loss over the seeds. A HOOK of
the form "quant8 / quant4" sets two hooks, the first on the shard axis and the second between the replicas. All ranks run on CPU
over gloo. For two nodes of eight GPUs, only the mesh would change to (2, 8).
"""

import argparse
import json
import math
import shlex
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich import box
from rich.console import Console
from rich.table import Table
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

import commhooks
from ch_bench import gpt, launch, record, text

HOOKS = ["allreduce", "bf16_compress(accumulate='fp32')", "powersgd(rank=4)", "bf16_wrapper(powersgd(rank=4))"]
HOOKS += ["quant4 / quant4", "quant8 / quant4"]  # hooks on the shard axis / between the replicas
CONTEXT, BATCH, WINDOWS = 64, 8, 64


def build(vocab: int, width: int, seed: int, device: torch.device) -> FSDPModule:
    """Return a GPT of two blocks. Each block and the rest are sharded over this rank's pair."""
    torch.manual_seed(seed)
    model = gpt.GPT(vocab, CONTEXT, width, layers=2, heads=4).to(device)
    mesh = init_device_mesh(device.type, (2, 2), mesh_dim_names=("replicate", "shard"))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def train(expr: str, seed: int, device: torch.device, args: argparse.Namespace) -> dict[str, Any]:
    """Train one model with one hook. Return its held-out loss and the handle's figures."""
    rank, world = dist.get_rank(), dist.get_world_size()
    data = text.load()
    model = build(data.vocab, args.width, seed, device)
    handles = attach(model, expr)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.99))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: warmup_cosine(step, args.steps))
    batches = text.Batches(data.train, BATCH, CONTEXT, rank, seed)
    for step in range(args.steps):
        x, y = (t.to(device) for t in batches[step])
        optimizer.zero_grad()
        model(x, y).backward()
        optimizer.step()
        schedule.step()
    stats: dict[str, float] = {}
    for handle in handles:
        stats |= handle.stats()
        if expr != "allreduce" and stats["compressed_steps"] != args.steps:
            raise RuntimeError(f"{handle.expr} compressed {stats['compressed_steps']:.0f} of {args.steps} steps")
    x, y = (t[rank::world].to(device) for t in text.validation(data.val, CONTEXT, WINDOWS))
    with torch.no_grad():
        loss = model(x, y)
    dist.all_reduce(loss)
    return {"hook": expr, "seed": seed, "loss": loss.item() / world, "steps": args.steps, "stats": stats}


def attach(model: FSDPModule, expr: str) -> list[commhooks.CommHook]:
    """Attach one handle if one fits, or one for each axis of "SHARD / REPLICATE"."""
    if " / " not in expr:
        return [commhooks.attach(model, expr)]
    shard, _, replicate = expr.partition(" / ")
    return [commhooks.attach(model, shard, axis="shard"), commhooks.attach(model, replicate, axis="replicate")]


def warmup_cosine(step: int, steps: int) -> float:
    """Return the share of the peak learning rate. It rises over a tenth of the run, then falls to
    zero along a cosine.
    """
    return min(1.0, (step + 1) / max(1, steps // 10)) * 0.5 * (1 + math.cos(math.pi * step / steps))


def worker(rank: int, world: int, device: torch.device, args: argparse.Namespace, out: Path) -> None:
    """Run all hooks and seeds, one after another. Rank 0 keeps the results."""
    runs = [train(expr, seed, device, args) for expr in args.hooks for seed in range(args.seeds)]
    if rank == 0:
        out.write_text(json.dumps(runs))


def table(runs: list[dict[str, Any]]) -> Table:
    """Return one row per hook."""
    found = Table(title="2 shards x 2 replicas: bytes sent by rank 0 per step", box=box.SIMPLE)
    found.add_column("hook", no_wrap=True)
    for heading in ("shard axis", "replicate axis", "against fp32", "held-out loss", "seeds"):
        found.add_column(heading, justify="right")
    plain = None
    for expr in dict.fromkeys(run["hook"] for run in runs):
        mine = [run for run in runs if run["hook"] == expr]
        stats, steps = mine[0]["stats"], mine[0]["steps"]
        shard, between = (stats.get(f"{axis}_wire_bytes") for axis in ("shard", "replicate"))
        plain = plain or between
        losses = [run["loss"] for run in mine]
        found.add_row(
            expr,
            f"{shard / steps:,.0f}" if shard is not None else "torch's own",
            f"{between / steps:,.0f}",
            f"{plain / between:.1f} x less" if between < plain else "",
            f"{statistics.mean(losses):.4f}",
            f"{min(losses):.4f} - {max(losses):.4f}",
        )
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "hooks", nargs="*", metavar="HOOK", help="hook expressions; the first is the baseline of the others"
    )
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--record", action="store_true", help="write the output to docs/measured/fsdp.md")
    words = sys.argv[1:] if argv is None else argv
    args = parser.parse_args(words)
    args.hooks = args.hooks or HOOKS
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "runs.json"
        launch.launch(worker, 4, args, out)
        runs = json.loads(out.read_text())
    if args.json is not None:
        args.json.write_text(json.dumps(runs))
    console = Console(record=True, width=120)
    console.print(table(runs))
    if args.record:
        command = shlex.join(["python", "docs/examples/fsdp2_hsdp.py", *words])
        title = f"Loss with hooks between replicas, {args.steps} steps"
        record.write("fsdp", title, command, record.printed(console))
    return 0


if __name__ == "__main__":
    sys.exit(main())
