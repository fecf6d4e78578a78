"""Cost of weighted averages: seconds of a training step with weights and without, each also compared with itself.

    python -m programs.cost.weights [--blocks 40]
    sudo python -m programs.cost.weights --link 200mbit,80ms [--blocks 20]

Two ranks train a GPT. A step is forward, backward and optimizer. Each hook has four models: two without weights and two with
them. In each block every model makes some steps, in random order, and its figure is their median. A ratio is formed in each
block. The table has its median over the blocks, and the quartiles in brackets. Without ``--link`` the ranks are processes on the
loopback. With it each one is in a network namespace of its own, and hooks are attached with ``link=`` from 5 ms on.
"""

import argparse
import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import ch_core
import commhooks
from ch_bench import gpt, record
from ch_bench.installation import Installation
from ch_bench.links import netns
from ch_bench.links.link import FAR_APART, Link

HOOKS = ["allreduce", "bf16_compress", "quant4(error_feedback=True)", "powersgd(rank=4)"]
WAYS = ("plain", "plain again", "weighted", "weighted again")
PAIRS = (("weighted", "plain"), ("plain again", "plain"), ("weighted again", "weighted"))
CONTEXT, WIDTH, LAYERS, HEADS, VOCAB, BATCH = 64, 256, 4, 4, 512, 4  # 3.3 M parameters
WARM_UP, STEPS = 5, 3


# -- one rank


class Trained:
    """One model with its hook."""

    def __init__(self, hook: str, way: str, link: str) -> None:
        torch.manual_seed(0)
        self.model = DistributedDataParallel(gpt.GPT(VOCAB, CONTEXT, WIDTH, LAYERS, HEADS), bucket_cap_mb=4)
        self.weighted = way.startswith("weighted")
        options: dict[str, Any] = {"link": link} if link else {}
        self.handle = commhooks.attach(self.model, hook, weighted=self.weighted, **options)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)

    def step(self, x: torch.Tensor, y: torch.Tensor, tokens: int) -> None:
        """Train one step."""
        self.optimizer.zero_grad()
        loss = self.model(x, y)
        if self.weighted:
            self.handle.weigh(tokens)
        loss.backward()
        self.optimizer.step()


def rank_main(rank: int, world: int, store: str, link: str) -> None:
    """Answer each ``WAY|HOOK`` with the times at which a step of this rank began and ended."""
    torch.set_num_threads(1)
    limit = timedelta(seconds=120)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=limit)
    x = torch.randint(VOCAB, (BATCH, CONTEXT), generator=torch.Generator().manual_seed(rank))
    models: dict[str, Trained] = {}
    print("ready", flush=True)
    for steps, line in enumerate(sys.stdin):
        words = line.strip()
        way, hook = words.split("|", 1)
        if words not in models:
            models[words] = Trained(hook, way, link)
        begun = time.monotonic()  # one clock for all namespaces
        models[words].step(x, x, 100 + (rank * 37 + steps * 11) % 156)  # unequal weights in every step
        print(begun, time.monotonic(), flush=True)


# -- the comparison


def start(folder: Path, link: str, spaces: Sequence[str]) -> Installation:
    """Start two ranks, each in its namespace if there are any."""
    mine = [sys.executable, "-m", "programs.cost.weights", "--rank"]
    commands = []
    for rank in range(2):
        enter = ["ip", "netns", "exec", spaces[rank]] if spaces else []
        commands.append([*enter, *mine, str(rank), "--store", str(folder / "store"), "--told", link])
    iface = {"GLOO_SOCKET_IFNAME": netns.IFACE if spaces else "lo"}
    return Installation(commands, {**os.environ, "OMP_NUM_THREADS": "1", **iface})


def step(ranks: Installation, way: str, hook: str) -> float:
    """Run one step and return its seconds, from the last rank's begin to the last rank's end."""
    times = [[float(word) for word in answer.split()] for answer in ranks.ask(f"{way}|{hook}")]
    return max(end for _, end in times) - max(begin for begin, _ in times)


def measure(hooks: Sequence[str], blocks: int, link: Link | None, seed: int) -> dict[tuple[str, str], list[float]]:
    """Return the seconds of a step in each block, by way and hook."""
    order = random.Random(seed)
    cells = [(way, hook) for hook in hooks for way in WAYS]
    found: dict[tuple[str, str], list[float]] = {cell: [] for cell in cells}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        spaces: Sequence[str] = ()
        told = ""
        if link is not None:
            net = stack.enter_context(netns.Network(2, link))
            spaces = net.names
            net.verify()
            if link.rate and link.round_trip and link.round_trip >= FAR_APART:
                told = str(ch_core.Link(link.rate, link.round_trip))
        ranks = start(folder, told, spaces)
        try:
            for cell in cells:
                for _ in range(WARM_UP):
                    step(ranks, *cell)
            for _ in range(blocks):
                for cell in order.sample(cells, len(cells)):
                    found[cell].append(median(step(ranks, *cell) for _ in range(STEPS)))
        finally:
            ranks.close()
    return found


def table(found: dict[tuple[str, str], list[float]], hooks: Sequence[str]) -> str:
    """Return the table of all hooks."""
    rows = []
    for hook in hooks:
        row = [f"`{hook}`", f"{1e3 * median(found['plain', hook]):.1f}"]
        for one, other in PAIRS:
            ratios = [a / b for a, b in zip(found[one, hook], found[other, hook], strict=True)]
            low, middle, high = quantiles(ratios, n=4)
            row.append(f"{middle:.3f} ({low:.3f}–{high:.3f})")
        rows.append(row)
    return record.markdown_table(["hook", "ms without weights", *(f"{one} / {other}" for one, other in PAIRS)], rows)


def main(argv: list[str] | None = None) -> int:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--link", default="", help="a rate and a round trip; without it the loopback")
    parser.add_argument("--blocks", type=int, default=40)
    parser.add_argument("--hooks", nargs="+", default=HOOKS, metavar="EXPR")
    parser.add_argument("--seed", type=int, default=1, help="of the order")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", default="", help=argparse.SUPPRESS)
    parser.add_argument("--told", default="", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.rank is not None:
        rank_main(args.rank, 2, args.store, args.told)
        return 0
    link = Link.parse_all(args.link)[0] if args.link else None
    if link is not None and (reason := netns.why_not(link)):
        print(f"skipped: {reason}", file=sys.stderr)
        return 0
    found = measure(args.hooks, args.blocks, link, args.seed)
    print(f"{args.link or 'loopback'}, 2 ranks, {args.blocks} blocks")
    print(table(found, args.hooks))
    return 0


if __name__ == "__main__":
    record.run_main(main)
