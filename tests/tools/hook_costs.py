"""Time hooks of two installations of commhooks against each other, in turns in one run.

    python tests/tools/hook_costs.py --before OLD_VENV/bin/python --after NEW_VENV/bin/python --blocks 40

Each installation runs two gloo processes over loopback. A block times three backward passes of every hook in each
installation, in random order. The model has 10.7 M parameters in the shapes of a GPT and a backward that costs almost
nothing, so the time is the hook's. Run it on an idle machine.
"""

import argparse
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from statistics import median, quantiles
from typing import Any

HOOKS = [
    "noop",
    "allreduce",
    "fp16_compress",
    "bf16_compress",
    "powersgd(rank=1)",
    "powersgd(rank=4)",
    "batched_powersgd(rank=2)",
    "bf16_wrapper(powersgd(rank=4))",
    "quant8",
    "quant4",
    "quant4(error_feedback=True)",
    "quant2",
    "sign",
    "quantize_per_tensor",
    "topk",
    "randomk",
]
WIDTH, LAYERS = 384, 6
RANKS = 2


def work(rank: int, store: str) -> None:
    """Serve one rank: read ``REPEATS HOOK`` lines and answer each with the median seconds of a backward pass."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    import commhooks

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    w = WIDTH
    layer = [(w, 3 * w), (3 * w,), (w, w), (w,), (w, 4 * w), (4 * w,), (4 * w, w), (w,), (w,), (w,)]
    shapes = [*layer * LAYERS, (97, w), (64, w)]

    class Products(nn.Module):
        """Sum of products of parameters and fixed inputs, so that gradients are the inputs."""

        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.ParameterList(nn.Parameter(torch.zeros(shape)) for shape in shapes)

        def forward(self, inputs: list[torch.Tensor]) -> torch.Tensor:
            return sum((weight * each).sum() for weight, each in zip(self.weights, inputs, strict=True))

    generator = torch.Generator().manual_seed(rank)
    inputs = [torch.randn(shape, generator=generator) for shape in shapes]
    models: dict[str, DistributedDataParallel] = {}
    print("ready", flush=True)
    for line in sys.stdin:
        repeats, hook = line.rstrip("\n").split(" ", 1)
        if hook not in models:
            models[hook] = DistributedDataParallel(Products())
            commhooks.attach(models[hook], hook)
        seconds = []
        for _ in range(int(repeats)):
            models[hook].zero_grad(set_to_none=True)
            loss = models[hook](inputs)
            dist.barrier()
            start = time.perf_counter()
            loss.backward()
            seconds.append(time.perf_counter() - start)
        print(median(seconds), flush=True)


def start(python: str, folder: Path) -> Any:
    """Start the ranks of a Python environment."""
    from ch_bench.installation import Installation  # not at the top: an installation to compare may be older than it

    store = str(folder / Path(python).parent.parent.as_posix().replace("/", "_"))
    commands = [[python, __file__, "--rank", str(rank), "--store", store] for rank in range(RANKS)]
    return Installation(commands, {**os.environ, "OMP_NUM_THREADS": "1"})


def seconds(installation: Any, hook: str, repeats: int) -> float:
    """Return the slower rank's median seconds of a backward pass."""
    return max(map(float, installation.ask(f"{repeats} {hook}")))


def main() -> None:
    """Print one row for each hook: medians, and the median and quartiles of after / before over blocks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", help="Python of the first installation")
    parser.add_argument("--after", help="Python of the second installation")
    parser.add_argument("--blocks", type=int, default=40)
    parser.add_argument("--hooks", nargs="+", default=HOOKS)
    parser.add_argument("--seed", type=int, default=1, help="of the order")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        return work(options.rank, options.store)
    order = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as folder:
        both = [start(python, Path(folder)) for python in (options.before, options.after)]
        for hook in options.hooks:
            for each in both:
                seconds(each, hook, 6)  # DDP rebuilds its buckets after the first step; some hooks compress later
        pairs: dict[str, list[tuple[float, float]]] = {hook: [] for hook in options.hooks}
        for _ in range(options.blocks):
            for hook in order.sample(options.hooks, len(options.hooks)):
                times = {each: seconds(each, hook, 3) for each in order.sample(both, 2)}
                pairs[hook].append((times[both[0]], times[both[1]]))
        for each in both:
            each.close()
    print(f"{'hook':32} before ms  after ms  after / before (quartiles), {options.blocks} blocks")
    for hook, times in pairs.items():
        low, middle, high = quantiles((after / before for before, after in times), n=4)
        before, after = (1000 * median(column) for column in zip(*times, strict=True))
        print(f"{hook:32} {before:9.1f} {after:9.1f}  {middle:.3f} ({low:.3f} … {high:.3f})")


if __name__ == "__main__":
    main()
