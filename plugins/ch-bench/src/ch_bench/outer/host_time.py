"""Host time that `commhooks run --outer` adds to an inner step.

    python -m ch_bench.outer.host_time [--blocks 15] [--steps 20] [--record]

One process trains the race's GPT twice in alternating blocks: in DDP under ``no_sync()``, and in DDP with an outer optimizer that
follows the script's optimizer and does not exchange. The CPU time of the thread is compared, in pairs of blocks.
"""

import argparse
import os
import subprocess
import sys
import time
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.nn.parallel import DistributedDataParallel

from ch_bench import gpt, record
from commhooks import HookNotSupportedError

VARIABLES = {"OUTER": "diloco(every=1000000)", "SINGLE_PROCESS": "1", "MODULE_PATTERN": "Followed"}


class Followed(gpt.GPT):
    """The model that trains with the outer optimizer."""


def main(argv: list[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Host time that run --outer adds to an inner step.")
    parser.add_argument("--blocks", type=int, default=15, help="pairs of blocks (default 15)")
    parser.add_argument("--steps", type=int, default=20, help="steps of a block (default 20)")
    parser.add_argument("--record", action="store_true", help="write the result to docs/measured/outer-run.md")
    args = parser.parse_args(argv)
    if "COMMHOOKS_OUTER" not in os.environ:
        environ = {**os.environ, **{f"COMMHOOKS_{name}": value for name, value in VARIABLES.items()}}
        words = sys.argv[1:] if argv is None else argv
        program = [sys.executable, "-m", "ch_bench.outer.host_time", *words]
        return subprocess.run(program, env=environ, check=False).returncode
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    plain, outer = _made(gpt.GPT), _made(Followed)
    pairs = []
    for block in range(-1, args.blocks):
        taken = [_block(*plain, args.steps, alone=True), _block(*outer, args.steps, alone=False)]
        if block >= 0:  # the first pair warms up
            pairs.append(taken)
    if outer[0].require_backward_grad_sync:
        raise HookNotSupportedError("the outer optimizer was not attached: is commhooks-hook.pth installed?")
    middle, low, high = record.interval([with_outer / without for without, with_outer in pairs])
    milliseconds = record.interval([without / args.steps * 1e3 for without, _ in pairs])[0]
    text = (
        f"{milliseconds:.2f} ms of CPU time a step without an outer optimizer. The outer optimizer adds {middle - 1:+.2%} "
        f"(95 %: {low - 1:+.2%} to {high - 1:+.2%}; {args.blocks} pairs of {args.steps} steps)."
    )
    print(text)
    if args.record:
        made_by = record.command("ch_bench.outer.host_time", argv)
        record.write("outer-run", "Host time of an inner step", made_by, text)
    dist.destroy_process_group()
    return 0


def _made(cls: type[gpt.GPT]) -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = DistributedDataParallel(cls(65, 64, 128, 4, heads=4))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def _block(model: Any, optimizer: torch.optim.Optimizer, steps: int, *, alone: bool) -> float:
    """Return the CPU seconds of some steps of this thread and the threads of its backwards."""
    x, y = torch.zeros(8, 64, dtype=torch.int64, device="cpu"), torch.ones(8, 64, dtype=torch.int64, device="cpu")
    begun = time.process_time()
    for _ in range(steps):
        optimizer.zero_grad()
        with model.no_sync() if alone else nullcontext():
            model(x, y).backward()
        optimizer.step()
    return time.process_time() - begun


if __name__ == "__main__":
    record.run_main(main)
