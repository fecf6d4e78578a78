"""Held-out loss of FSDP2 with hooks on weight gathers and gradients, compared with plain FSDP2 in bf16.

    python -m programs.fsdp2.quality [--steps 600] [--seeds 3] [--out FOLDER] [--record]

A small GPT learns the text of Python's documentation on four simulated ranks (AdamW, warm-up, cosine to a tenth of the rate).
Each step codes the shards of all ranks with the hook's own ``gather_weights``, computes every rank's loss and gradients with
the decoded bf16 weights, and reduces the gradients in bf16 with the hook's own ``run_scatter``. The optimizer steps on exact
fp32 weights. All rows of a seed start from the same weights and see the same batches. The held-out loss is that of the exact
weights. ``tests/test_fsdp2_quality.py`` compares the simulation with ``fully_shard`` on two processes.

Every finished run is kept in ``FOLDER/fsdp2-quality-STEPS.json``, so that another start continues.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

import commhooks
from ch_bench import record
from ch_core import perform
from commhooks import BucketLayout, ReduceScatter, ShardLayout, Shards, StepContext, Weights
from programs.convergence.tasks import SETTINGS, Language

RANKS = 4
BF16 = torch.bfloat16
PLAIN = "plain FSDP2, bf16"
ROWS: dict[str, dict[str, str]] = {
    PLAIN: {},
    "quant8 weights": {"gather": "quant8"},
    "quant8 weights, quant4 gradients": {"gather": "quant8", "shard": "quant4"},
    "quant4 gradients": {"shard": "quant4"},
    "quant4 weights": {"gather": "quant4"},
}
LIMITS = {  # nats above plain FSDP2, on average over the seeds
    "quant8 weights": 0.005,
    "quant8 weights, quant4 gradients": 0.015,
}


class SimulatedFSDP2:
    """The weights and gradients of FSDP2 on simulated ranks, through hooks.

    Args:
        model: fp32; its parameters are the exact weights.
        hooks: expression of the axes ``"gather"`` and ``"shard"``; an axis without one is exact in bf16.
    """

    def __init__(self, model: torch.nn.Module, hooks: Mapping[str, str]) -> None:
        self.params = dict(model.named_parameters())
        shapes = {name: tuple(p.shape) for name, p in self.params.items()}
        self.cut = ShardLayout.of(BucketLayout.of_shapes(shapes, BF16, "cpu"), RANKS)
        made = {axis: commhooks.create(expression).reduction for axis, expression in hooks.items()}
        self.gather, self.shard = made.get("gather"), made.get("shard")
        embeddings = {"symbol.weight", "position.weight"}
        self.exact = embeddings | {name for name, shape in shapes.items() if len(shape) < 2}

    def flat(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the padded parts of all ranks, ``(RANKS * n,)`` bf16."""
        storage = torch.zeros(RANKS, self.cut.part.numel, dtype=BF16, device="cpu")
        for p in self.cut.part.params:
            whole = tensors[p.name].detach().reshape(-1)
            padded = torch.zeros(RANKS * p.numel, dtype=BF16, device="cpu")
            padded[: whole.numel()] = whole
            storage[:, p.offset : p.offset + p.numel] = padded.view(RANKS, -1)
        return storage.view(-1)

    def whole(self, storage: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the parameters of :meth:`flat`."""
        parts = storage.view(RANKS, -1)
        found = {}
        for p in self.cut.part.params:
            shape = self.cut.whole[p.name]
            flat = parts[:, p.offset : p.offset + p.numel].reshape(-1)
            found[p.name] = flat[: torch.Size(shape).numel()].view(shape)
        return found

    def decoded(self) -> dict[str, torch.Tensor]:
        """Return the weights that all ranks compute with, bf16."""
        exact = self.flat(self.params)
        if self.gather is None:
            return self.whole(exact)
        every = [exact.clone() for _ in range(RANKS)]
        runs = [
            self.gather.start_gather_weights(Weights(self.cut, storage, rank), StepContext(rank, RANKS), self.exact)
            for rank, storage in enumerate(every)
        ]
        carry_out(runs)
        if not all(torch.equal(one, every[0]) for one in every):
            raise RuntimeError(f"{self.gather!r}: the ranks have different weights")
        return self.whole(every[0])

    def reduced(self, gradients: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Return the average of the ranks' gradients, bf16."""
        flats = [self.flat(one) for one in gradients]
        if self.shard is None:
            total = flats[0]
            for one in flats[1:]:
                total = total + one  # in bf16, as a ring adds
            return self.whole(total / RANKS)
        outputs = [torch.empty(self.cut.part.numel, dtype=BF16, device="cpu") for _ in range(RANKS)]
        runs = [
            self.shard.start_scatter(Shards(self.cut, flat, output), StepContext(rank, RANKS))
            for rank, (flat, output) in enumerate(zip(flats, outputs, strict=True))
        ]
        carry_out(runs)
        return self.whole(torch.cat(outputs))


def carry_out(runs: Iterable[Any]) -> None:
    """Run the generators of all ranks in step, and carry out their requests."""
    live = list(runs)
    while True:
        asked = [next(run, None) for run in live]
        if asked[0] is None:
            return
        rounds = [one if isinstance(one, tuple) else (one,) for one in asked]
        for requests in zip(*rounds, strict=True):
            _carry_out(requests)


def _carry_out(requests: tuple[Any, ...]) -> None:
    if not isinstance(requests[0], ReduceScatter):
        perform(requests[0].kind, "sum", [(request.output, request.input) for request in requests])
        return
    mean = torch.stack([request.input for request in requests]).float().mean(0).view(RANKS, -1)  # of exact parameters
    for request, part in zip(requests, mean, strict=True):
        request.output.copy_(part)


def train(row: str, seed: int, steps: int) -> dict[str, float]:
    """Train one row. Return the held-out ``loss`` and ``seconds``."""
    begun = time.perf_counter()
    torch.set_num_threads(1)
    task = Language(type(SETTINGS["gpt_cosine"])(**{**SETTINGS["gpt_cosine"].as_dict(), "steps": steps}), seed)
    model = task.model
    fsdp = SimulatedFSDP2(model, ROWS[row])
    torch.manual_seed(seed)
    small = task.make()  # computes in fp32 with the decoded weights, because a CPU is slow in bf16
    names = [name for name, _ in small.named_parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=task.setting.lr)
    for step in range(steps):
        with torch.no_grad():
            weights = fsdp.decoded()
            for name, p in small.named_parameters():
                p.copy_(weights[name])
        every = []
        for rank in range(RANKS):
            loss = task.loss(small, rank, step)
            every.append(dict(zip(names, torch.autograd.grad(loss, list(small.parameters())), strict=True)))
        with torch.no_grad():
            average = fsdp.reduced(every)
        for name, p in model.named_parameters():
            p.grad = average[name].float()
        for group in optimizer.param_groups:
            group["lr"] = task.rate(step)
        optimizer.step()
    with torch.no_grad():
        held_out = task.measure()[1]
    return {"loss": held_out, "seconds": time.perf_counter() - begun}


def table(found: Mapping[str, Any], seeds: int) -> str:
    """Return the losses as Markdown, with the mean difference to plain FSDP2 over the same seeds, and its limit."""
    rows = []
    for row in ROWS:
        ran = [seed for seed in range(seeds) if f"{row}/{seed}" in found]
        if not ran:
            continue
        losses = [found[f"{row}/{seed}"]["loss"] for seed in ran]
        more = statistics.mean(losses) - statistics.mean(found[f"{PLAIN}/{seed}"]["loss"] for seed in ran)
        limit = LIMITS.get(row)
        holds = "" if limit is None else f"{limit:.3f}: {'holds' if more <= limit else 'MISSED'}"
        each = " ".join(f"{loss:.4f}" for loss in losses)
        rows.append([row, f"{statistics.mean(losses):.4f}", each, f"{more:+.4f}" if row != PLAIN else "", holds])
    return record.markdown_table(["hook", "held-out loss", "seeds", "above plain", "limit"], rows)


def main(argv: list[str] | None = None) -> int:
    """Run what is missing, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=1e9, help="start no run after so many minutes")
    parser.add_argument("--out", type=Path, default=Path("."), help="folder for finished runs")
    parser.add_argument("--record", action="store_true", help="write the table to docs/measured/fsdp2-gather.md")
    args = parser.parse_args(argv)
    finished = record.FinishedRuns(args.out / f"fsdp2-quality-{args.steps}.json")
    first, end = [PLAIN, *LIMITS], time.monotonic() + 60 * args.minutes
    rest = [row for row in ROWS if row not in first]
    todo = [(row, seed) for rows in (first, rest) for seed in range(args.seeds) for row in rows]
    for row, seed in todo:
        if f"{row}/{seed}" not in finished.runs:
            if time.monotonic() > end:
                return 3
            finished.put(f"{row}/{seed}", train(row, seed, args.steps))
            print(row, seed, finished.runs[f"{row}/{seed}"], file=sys.stderr, flush=True)
    shown = table(finished.runs, args.seeds)
    print(shown)
    if args.record:
        made_by = record.command("programs.fsdp2.quality", argv)
        record.write("fsdp2-gather", f"Loss after {args.steps} steps", made_by, shown)
    return 0


if __name__ == "__main__":
    record.run_main(main)
