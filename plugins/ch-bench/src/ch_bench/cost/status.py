"""What the status costs where little else is done: `allreduce` and `fp16_compress`, ours, ours without it, and PyTorch's.

    OMP_NUM_THREADS=1 python -m ch_bench.cost.status --out docs/measured/status.md

Two gloo processes over loopback; a backward hands over given gradients (the shapes of a GPT of 10.7 M parameters, fp32), in one
bucket and in three. In each round every candidate and ``noop`` step once, in an order drawn anew; rounds are grouped in blocks.
A cost is a step less ``noop``'s; ratios to PyTorch's hook are formed in each block, and their 95 % interval is a bootstrap over
blocks.

The second table says where the host's time goes in a step of ours, in microseconds: in ``submit`` (taking over, encoding,
starting messages), in ``finish`` (until gradient and status have come), in making and sending the status, in settling the
step before; and how much of ``finish`` is waiting for the gradient. The rest of ``finish`` is the status, and bookkeeping.
"""

import argparse
import random
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import commhooks
from ch_bench.bench_report import command, heading, interval
from ch_bench.gpu_kit.models import ShapesOnly, made_up, register_torch
from ch_bench.shapes import gpt_shapes
from commhooks.testing import spawn

Sizes = tuple[int, int, int, int]  # layers, width, vocabulary, context
GPT, SMALL = (6, 384, 96, 128), (1, 64, 96, 16)
HOOKS = ("allreduce", "fp16_compress", "bf16_compress")
BUCKETS = (1, 3)
WARM_UP = 6
PHASES = {  # of a step: object, method
    "submit": ("engine", "submit"),
    "finish": ("engine", "finish"),
    "send the status": ("sender", "send_status"),
    "settle the step before": ("open_steps", "answer"),
}


def _model(sizes: Sizes, buckets: int) -> DistributedDataParallel:
    given = made_up(gpt_shapes(*sizes), torch.float32, torch.device("cpu"))
    cap = 1e6 if buckets == 1 else sum(g.nbytes for g in given) / buckets / 2**20
    return DistributedDataParallel(ShapesOnly(given), bucket_cap_mb=cap, gradient_as_bucket_view=True)


def candidates(hook: str, sizes: Sizes, buckets: int) -> tuple[dict[str, Callable[[], None]], Any]:
    """A step of each, and the engine of ours."""
    models = {name: _model(sizes, buckets) for name in ("noop", "ours", "without", "theirs")}
    commhooks.attach(models["noop"], "noop")
    ours = commhooks.attach(models["ours"], hook)
    silent = commhooks.attach(models["without"], hook)
    assert ours.binding is not None
    assert silent.binding is not None
    assert silent.binding.engine is not None
    silent.binding.engine.sender.sends_status = False  # not to be had otherwise: the ranks decide nothing together then
    register_torch(models["theirs"], hook)
    return {name: partial(_step, model) for name, model in models.items()}, ours.binding.engine


def _step(model: DistributedDataParallel) -> None:
    model.zero_grad(set_to_none=False)
    model().backward()


def measure(rank: int, world: int, hook: str, sizes: Sizes, buckets: int, blocks: int, steps: int) -> dict[str, Any]:
    """Seconds of every step by candidate and block, and of the phases of ours."""
    torch.set_num_threads(1)
    calls, engine = candidates(hook, sizes, buckets)
    for _ in range(WARM_UP):
        for call in calls.values():
            call()
    draw, seconds = random.Random(0), {name: [[0.0] * steps for _ in range(blocks)] for name in calls}
    for block in range(blocks):
        for step in range(steps):
            for name in draw.sample(list(calls), len(calls)):
                dist.barrier()
                begun = time.perf_counter()
                calls[name]()
                seconds[name][block][step] = time.perf_counter() - begun
    return {"seconds": seconds, "phases": _phases(engine, calls["ours"], steps)}


def _phases(engine: Any, step: Callable[[], None], steps: int) -> dict[str, float]:
    """Seconds of a step's phases, medians; measured apart from the steps, which the clock would lengthen."""
    taken: dict[str, list[float]] = defaultdict(list)
    holders = {"engine": engine, "sender": engine.sender, "open_steps": engine.open_steps}
    waited = engine.counters.wait_seconds
    for name, (holder, method) in PHASES.items():
        setattr(holders[holder], method, _timed(getattr(holders[holder], method), taken[name]))
    for _ in range(steps):
        for each in taken.values():
            each.append(0.0)
        dist.barrier()
        step()
    for holder, method in PHASES.values():
        delattr(holders[holder], method)
    found = {name: median(each) for name, each in taken.items()}
    return found | {"of finish, for the gradient": (engine.counters.wait_seconds - waited) / steps}


def _timed(call: Callable[..., Any], into: list[float]) -> Callable[..., Any]:
    def timed(*args: Any, **kwargs: Any) -> Any:
        begun = time.perf_counter()
        try:
            return call(*args, **kwargs)
        finally:
            into[-1] += time.perf_counter() - begun

    return timed


def table(hooks: tuple[str, ...], sizes: Sizes, blocks: int, steps: int) -> str:
    """Costs, ratios with their intervals and phases, as Markdown."""
    lines = [
        "| hook | buckets | PyTorch's, ms | ours, ms | without status, ms | ours / PyTorch's | without / PyTorch's "
        "| the status, ms |",
        "|---|---|---|---|---|---|---|---|",
    ]
    phases = [
        f"| hook | buckets | {' | '.join([*PHASES, 'of finish, for the gradient'])} |",
        "|---" * (len(PHASES) + 3) + "|",
    ]
    for hook in hooks:
        for buckets in BUCKETS:
            found: Any = spawn(measure, 2, hook, sizes, buckets, blocks, steps, timeout=1200)[0]
            medians = {name: [median(block) for block in each] for name, each in found["seconds"].items()}
            cost = {n: [s - z for s, z in zip(m, medians["noop"], strict=True)] for n, m in medians.items()}
            ratios = [
                _shown(interval([a / b for a, b in zip(cost[n], cost["theirs"], strict=True)]))
                for n in ("ours", "without")
            ]
            more = interval([1e3 * (a - b) for a, b in zip(cost["ours"], cost["without"], strict=True)])
            ms = " | ".join(f"{1e3 * median(cost[name]):.2f}" for name in ("theirs", "ours", "without"))
            lines.append(f"| `{hook}` | {buckets} | {ms} | {ratios[0]} | {ratios[1]} | {_shown(more)} |")
            phases.append(
                f"| `{hook}` | {buckets} | {' | '.join(f'{1e6 * each:.0f}' for each in found['phases'].values())} |"
            )
            print(lines[-1], phases[-1], sep="\n", flush=True)
    return "\n".join([*lines, "", *phases])


def _shown(found: tuple[float, float, float]) -> str:
    return f"{found[0]:.3f} ({found[1]:.3f} … {found[2]:.3f})"


def main(argv: list[str] | None = None) -> None:
    """Measure, print, and write the record if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="tiny shapes, few steps")
    parser.add_argument("--blocks", type=int, default=40, help="of rounds")
    parser.add_argument("--steps", type=int, default=10, help="rounds of a block")
    parser.add_argument("--out", type=Path, help="write the tables, with machine and versions, to this file")
    chosen = parser.parse_args(argv)
    sizes, blocks, steps = (SMALL, 2, 3) if chosen.small else (GPT, chosen.blocks, chosen.steps)
    found = table(HOOKS[:1] if chosen.small else HOOKS, sizes, blocks, steps)
    if chosen.out is not None:
        about = heading("What the status costs", command("ch_bench.cost.status", argv), "2 gloo processes")
        chosen.out.write_text(f"{about}\n{__doc__}\n{found}\n")


if __name__ == "__main__":
    main()
