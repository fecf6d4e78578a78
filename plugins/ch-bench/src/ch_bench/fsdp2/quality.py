"""Held-out loss of FSDP2 with hooks on weight gathers and gradients, beside plain FSDP2 in bf16.

    python -m ch_bench.fsdp2.quality [--steps 600] [--seeds 3] [--out FOLDER] [--record]

A small GPT learns the text of Python's documentation on four gloo processes (AdamW, warm-up, cosine to a tenth of the rate).
Weights are gathered and gradients reduced in bf16 (``MixedPrecisionPolicy``). All rows of a seed start from the same weights
and see the same batches. The held-out loss is that of the exact weights.

A finished run is kept in ``FOLDER/fsdp2-quality.json``, so that a second start continues.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

import commhooks
from ch_bench import gpt, launch, record, text
from ch_bench.convergence.tasks import SETTINGS, Language

RANKS, BATCH, WINDOWS = 4, 8, 256
DIFFERENCE = "difference(quant4)"
PLAIN = "plain FSDP2, bf16"
ROWS: dict[str, dict[str, str]] = {
    PLAIN: {},
    "quant8 weights": {"gather": "quant8"},
    "quant4 gradients": {"shard": "quant4"},
    "quant8 weights, quant4 gradients": {"gather": "quant8", "shard": "quant4"},
    "4-bit differences, quant4 gradients": {"gather": DIFFERENCE, "shard": "quant4"},
    "4-bit differences": {"gather": DIFFERENCE},
    "quant4 weights": {"gather": "quant4"},
    "quant4 weights, quant4 gradients": {"gather": "quant4", "shard": "quant4"},
}
LIMITS = {  # nats above plain FSDP2, on average over the seeds
    "quant8 weights": 0.005,
    "quant8 weights, quant4 gradients": 0.015,
    "4-bit differences, quant4 gradients": 0.015,
}


def shard(model: gpt.GPT, device: torch.device, world: int) -> FSDPModule:
    """Shard every block and the rest over all ranks, in bf16."""
    mesh = init_device_mesh(device.type, (world,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def worker(rank: int, world: int, device: torch.device, todo: list[tuple[str, int]], steps: int, path: Path) -> None:
    """Train rows, each with a seed. After each run, rank 0 adds the result to ``path``."""
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    for row, seed in todo:
        made = train(rank, world, device, row, seed, steps)
        if rank == 0:
            found[f"{row}/{seed}"] = made
            path.write_text(json.dumps(found, indent=1))
            print(row, seed, made, file=sys.stderr, flush=True)


def train(rank: int, world: int, device: torch.device, row: str, seed: int, steps: int) -> dict[str, Any]:
    """Train one row. Return ``loss``, and ``bytes`` that this rank sends on each axis in a step."""
    begun = time.perf_counter()
    data, wide = text.load(), Language.CONTEXT
    torch.manual_seed(seed)
    net = gpt.GPT(data.vocab, wide, Language.WIDTH, Language.LAYERS, Language.HEADS).to(device)
    model = shard(net, device, world)
    handles = {axis: commhooks.attach(model, hook, axis=axis) for axis, hook in ROWS[row].items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=SETTINGS["gpt_cosine"].lr)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: share(step, steps))
    batches = text.Batches(data.train, BATCH, wide, rank, seed)
    for step in range(steps):
        optimizer.zero_grad()
        model(*batches[step]).backward()
        optimizer.step()
        schedule.step()
    sent = {axis: handle.stats()[f"{axis}_wire_bytes"] / steps for axis, handle in handles.items()}
    whole = {name: p.full_tensor().detach() for name, p in model.named_parameters()}  # type: ignore[attr-defined]
    for handle in handles.values():
        handle.detach()
    exact = gpt.GPT(data.vocab, wide, Language.WIDTH, Language.LAYERS, Language.HEADS)
    exact.load_state_dict(whole)
    with torch.no_grad():
        loss = exact(*text.validation(data.val, wide, WINDOWS)).item()
    return {"loss": loss, "bytes": sent, "seconds": time.perf_counter() - begun}


def share(step: int, steps: int) -> float:
    """Return the share of the learning rate in a step, as in the study of convergence."""
    task = Language.__new__(Language)
    task.setting = type(SETTINGS["gpt_cosine"])("gpt_cosine", steps, BATCH, 1.0, recipe="cosine")
    return task.rate(step)


def table(found: Mapping[str, Any], seeds: int) -> str:
    """Return the losses as Markdown, with the mean difference to plain FSDP2 and its limit."""
    rows = []
    for row in ROWS:
        losses = [found[f"{row}/{seed}"]["loss"] for seed in range(seeds)]
        more = statistics.mean(losses) - statistics.mean(found[f"{PLAIN}/{seed}"]["loss"] for seed in range(seeds))
        limit = LIMITS.get(row)
        holds = "" if limit is None else f"{limit:.3f}: {'holds' if more <= limit else 'MISSED'}"
        each = " ".join(f"{loss:.4f}" for loss in losses)
        rows.append([row, f"{statistics.mean(losses):.4f}", each, f"{more:+.4f}" if row != PLAIN else "", holds])
    return record.markdown_table(["row", "held-out loss", "seeds", "above plain", "limit"], rows)


def main(argv: list[str] | None = None) -> int:
    """Run what is missing, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("."), help="folder for finished runs")
    parser.add_argument("--record", action="store_true", help="write the table to docs/measured/fsdp2-gather.md")
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    path = (args.out / "fsdp2-quality.json").resolve()
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    first = sorted(ROWS, key=lambda row: row != PLAIN and row not in LIMITS)
    every = [(row, seed) for rows in (first[:4], first[4:]) for seed in range(args.seeds) for row in rows]
    todo = [(row, seed) for row, seed in every if f"{row}/{seed}" not in found]
    if todo:
        launch.launch(worker, RANKS, todo, args.steps, path)
    shown = table(json.loads(path.read_text()), args.seeds)
    print(shown)
    if args.record:
        made_by = record.command("ch_bench.fsdp2.quality", argv)
        record.write("fsdp2-gather", f"Loss after {args.steps} steps", made_by, shown)
    return 0


if __name__ == "__main__":
    record.run_main(main)
