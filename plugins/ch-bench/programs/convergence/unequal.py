"""A small GPT on packed documents of unequal length: plain DDP, weighted DDP and one process on the same tokens.

    python -m programs.convergence.unequal [--ranks 4] [--seeds 3] [--steps 300] [--record]

Each rank packs documents of its own into a batch, so ranks have different numbers of tokens in every step. The document lengths
of a rank are drawn from 2 to 64 characters, around a mean that changes from rank to rank and from step to step. All three
trainings see the same tokens, start from the same weights and use the same optimizer. One process has the mean loss over the
tokens of all ranks. Ranks are processes over gloo.

The table has the loss on held-out text, per character, and the distance of the parameters from those of one process, divided by
the distance that one process has moved. Both are read after the last step.
"""

import argparse
from statistics import mean
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commhooks
from ch_bench import gpt, record, text
from ch_testing import spawn

CONTEXT, WIDTH, LAYERS, HEADS, WINDOWS = 64, 64, 2, 4, 128
DOCUMENTS = 8  # of one rank in one step
NONE = -100  # target of padding, which the loss leaves out
HOOKS = ("allreduce", "quant4(error_feedback=True)", "powersgd(rank=4)")
PLAIN, WEIGHTED = "plain", "weighted"


def packed(data: torch.Tensor, seed: int, step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return a rank's documents of one step, padded: ``x`` and ``y``, ``(DOCUMENTS, CONTEXT)``, and their tokens."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + rank * 7919 + step * 104_729)
    typical = 2.0 ** (1 + 5 * torch.rand(1, generator=generator).item())  # 2 to 64
    lengths = (typical * (0.5 + torch.rand(DOCUMENTS, generator=generator))).round().clamp(2, CONTEXT).long()
    x = torch.zeros(DOCUMENTS, CONTEXT, dtype=torch.int64)
    y = torch.full((DOCUMENTS, CONTEXT), NONE)
    for row, length in enumerate(lengths.tolist()):
        start = int(torch.randint(len(data) - CONTEXT - 1, (1,), generator=generator))
        x[row, :length], y[row, :length] = data[start : start + length], data[start + 1 : start + length + 1]
    return x, y, int(lengths.sum())


def made(vocab: int, seed: int) -> nn.Module:
    """Return the model at its start."""
    torch.manual_seed(seed)
    return gpt.GPT(vocab, CONTEXT, WIDTH, LAYERS, HEADS)


@torch.no_grad()
def held_out(model: nn.Module, data: torch.Tensor) -> float:
    """Return the loss on held-out text."""
    return float(model(*text.validation(data, CONTEXT, WINDOWS)))


def train(rank: int, world: int, seed: int, steps: int) -> dict[str, Any]:
    """Train one model for each hook and way, and one that sees all tokens."""
    torch.set_num_threads(1)
    corpus = text.load()
    alone = made(corpus.vocab, seed)
    start = torch.cat([p.detach().reshape(-1).clone() for p in alone.parameters()])
    nets = {(hook, way): made(corpus.vocab, seed) for hook in HOOKS for way in (PLAIN, WEIGHTED)}
    models = {key: DistributedDataParallel(net, bucket_cap_mb=0.2) for key, net in nets.items()}
    handles = {key: commhooks.attach(model, key[0], weighted=key[1] == WEIGHTED) for key, model in models.items()}
    optimizers = {key: torch.optim.Adam(net.parameters(), lr=3e-3) for key, net in nets.items()}
    own = torch.optim.Adam(alone.parameters(), lr=3e-3)
    tokens: list[list[int]] = []
    for step in range(steps):
        every = [packed(corpus.train, seed, step, one) for one in range(world)]
        tokens.append([n for _, _, n in every])
        own.zero_grad()
        alone(torch.cat([x for x, _, _ in every]), torch.cat([y for _, y, _ in every])).backward()
        own.step()
        x, y, n = every[rank]
        for key, model in models.items():
            optimizers[key].zero_grad()
            loss = model(x, y)
            if key[1] == WEIGHTED:
                handles[key].weigh(n)
            loss.backward()
            optimizers[key].step()
    end = torch.cat([p.detach().reshape(-1) for p in alone.parameters()])
    moved = float((end - start).norm())
    found: dict[str, Any] = {"one process": [held_out(alone, corpus.val), 0.0]}
    for (hook, way), net in nets.items():
        here = torch.cat([p.detach().reshape(-1) for p in net.parameters()])
        found[f"{hook}, {way}"] = [held_out(net, corpus.val), float((here - end).norm()) / moved]
    found["skew"] = mean(max(one) * world / sum(one) for one in tokens)
    return found


def main(argv: list[str] | None = None) -> int:
    """Train with every seed, and print one table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--record", action="store_true", help="write docs/measured/unequal.md")
    args = parser.parse_args(argv)
    runs, rows = [], []
    for seed in range(args.seeds):
        runs.append(spawn(train, args.ranks, seed, args.steps, timeout=24 * 3600)[0])
        print(
            f"seed {seed}: largest weight over the mean weight {runs[-1]['skew']:.2f}, mean over the steps", flush=True
        )
    for name in (key for key in runs[0] if key != "skew"):
        losses, far = [run[name][0] for run in runs], mean(run[name][1] for run in runs)
        rows.append([name, *(f"{loss:.4f}" for loss in losses), f"{mean(losses):.4f}", f"{far:.2g}"])
    heads = ["method", *(f"seed {seed}" for seed in range(args.seeds)), "mean", "distance from one process"]
    table, skew = record.markdown_table(heads, rows), mean(run["skew"] for run in runs)
    print(table)
    if args.record:
        made_by = record.command("programs.convergence.unequal", argv)
        note = f"largest weight over the mean: {skew:.2f}, mean of all steps"
        record.write("unequal", "Loss on packed documents of unequal length", made_by, table, note)
    return 0


if __name__ == "__main__":
    record.run_main(main)
