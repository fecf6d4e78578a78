"""What each hook costs in two installations of commhooks, say of two commits, in one run.

    python -m ch_bench.cost.trees BEFORE AFTER [--starts 10] [--blocks 10] [--record NAME]

BEFORE and AFTER are Python interpreters, each of an environment with one installation. Either has two ranks of its own
and every hook a GPT of 10.7 M parameters (width 384, 6 layers) there; all four processes are alive, one pair at a time
steps and the other waits for its turn. In each round every hook steps once in each installation, in an order drawn anew.
The cost before is the median step less the median step of torch's own no-op hook; what it costs more or less after is the
median difference of two steps of one round, because the rounds differ by more than the installations, less the same of
the no-op hook. Processes that run the same code differ too, by where their memory lies: all four are started anew
`--starts` times, with the models in another order and gaps between them, and the interval of the ratio is a bootstrap
over starts and, within each, over its blocks of rounds.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from ch_bench import bench_report

HOOKS = [
    ("allreduce", 25.0),
    ("bf16_compress", 25.0),
    ("fp16_compress", 25.0),
    ("error_feedback(bf16_compress)", 25.0),
    ("powersgd(rank=1)", 1000.0),
    ("powersgd(rank=1)", 14.0),
    ("powersgd(rank=4)", 1000.0),
    ("powersgd(rank=4)", 14.0),
]  # expression, bucket_cap_mb: 14 makes three buckets, 1000 one
WORLD = 2
WARM_UP = 4  # steps: DDP rebuilds its buckets after the first, PowerSGD compresses from the second or third


def main(argv: list[str] | None = None) -> int:
    """Measure and report; exit code 1 if a limit is passed."""
    parser = argparse.ArgumentParser(description="Time the hooks of two installations, interleaved step by step.")
    parser.add_argument("before", help="python of the environment to compare with")
    parser.add_argument("after", help="python of the environment to judge")
    parser.add_argument("--starts", type=int, default=10, help="processes are started anew so many times")
    parser.add_argument("--first", type=int, default=0, help="number of the first start, from which its order follows")
    parser.add_argument("--blocks", type=int, default=10, help="blocks per start")
    parser.add_argument("--steps", type=int, default=4, help="steps per block, hook and installation")
    parser.add_argument("--limit", type=float, default=1.05, help="legal upper end of each ratio's interval")
    parser.add_argument(
        "--only", nargs="+", metavar="WORD", help="hooks that have one of these in 'EXPRESSION, bucket_cap_mb'"
    )
    parser.add_argument("--record", metavar="NAME", help="keep the output as docs/measured/NAME-DATE.md")
    parser.add_argument(
        "--raw", type=Path, metavar="FILE", help="keep the seconds of every step there, beside those that are"
    )
    args = parser.parse_args(argv)
    hooks = [
        (name, cap) for name, cap in HOOKS if not args.only or any(word in f"{name}, {cap:g}" for word in args.only)
    ]
    load = os.getloadavg()[0]
    console = Console(record=True, width=None if sys.stdout.isatty() else 120)
    starts = json.loads(args.raw.read_text()) if args.raw and args.raw.exists() else []
    for start in range(args.first, args.first + args.starts):
        starts.append(_measure([args.before, args.after], hooks, start, args.blocks, args.steps))
        if args.raw:
            args.raw.write_text(json.dumps(starts))
    table = Table(
        title=f"{len(starts)} starts, {args.blocks} blocks of {args.steps} steps, {WORLD} ranks; load before {load:.1f}",
        box=None,
    )
    for column in ("hook", "bucket_cap_mb", "cost before, ms", "after, ms", "ratio", "95 %", f"<= {args.limit}"):
        table.add_column(column, justify="left" if column == "hook" else "right")
    worst = 0.0
    for hook, (name, cap) in enumerate(hooks):
        rounds = [
            [list(zip(*sides, strict=True)) for sides in zip(old[hook], new[hook], old[-1], new[-1], strict=True)]
            for old, new in starts
        ]
        (before, more), (low, high) = _cost([block for start in rounds for block in start]), _interval(rounds)
        worst = max(worst, high)
        cells = [
            f"{1e3 * before:.1f}",
            f"{1e3 * (before + more):.1f}",
            f"{1 + more / before:.3f}",
            f"{low:.2f} … {high:.2f}",
        ]
        table.add_row(name, f"{cap:g}", *cells, "holds" if high <= args.limit else "FAILS")
    console.print(table)
    if args.record:
        command = f"python -m ch_bench.cost.trees BEFORE AFTER --starts {args.starts} --blocks {args.blocks} --steps {args.steps}"
        console.print(f"recorded: {bench_report.record(args.record, command, console)}")
    return int(worst > args.limit)


Rounds = list[tuple[float, float, float, float]]  # seconds of a hook before and after, of the no-op hook twice


def _cost(blocks: list[Rounds]) -> tuple[float, float]:
    """Seconds that the hook costs before, and how many more after."""
    rounds = [each for block in blocks for each in block]
    cost = median(before for before, *_ in rounds) - median(noop for *_, noop, _ in rounds)
    more = median(after - before for before, after, *_ in rounds)
    return cost, more - median(after - before for *_, before, after in rounds)


def _interval(starts: list[list[Rounds]]) -> tuple[float, float]:
    """The 95 % interval of the ratio of costs, over resampled starts and their resampled blocks."""
    draw = random.Random(0)
    drawn = (draw.choices(starts, k=len(starts)) for _ in range(1000))
    costs = [_cost([block for start in each for block in draw.choices(start, k=len(start))]) for each in drawn]
    ratios = sorted(1 + more / before for before, more in costs)
    return ratios[25], ratios[974]


Hook = tuple[str, float]


def _measure(
    pythons: list[str], hooks: list[Hook], start: int, blocks: int, steps: int
) -> list[list[list[list[float]]]]:
    """Seconds of one start by installation, hook (torch's no-op hook is the last), block and step: of the slower rank."""
    with tempfile.TemporaryDirectory() as folder:
        sides = [
            [_start(python, rank, hooks, Path(folder) / f"store{side}", start) for rank in range(WORLD)]
            for side, python in enumerate(pythons)
        ]
        try:
            turns = list(product(range(len(pythons)), range(len(hooks) + 1)))
            for warm, (side, hook) in product(range(WARM_UP), turns):
                _step(sides[side], warm, hook)
            seconds: list[list[list[list[float]]]] = [[[] for _ in range(len(hooks) + 1)] for _ in pythons]
            for block in range(blocks):
                for side, hook in turns:
                    seconds[side][hook].append([])
                for step in range(steps):
                    order = random.Random((start * blocks + block) * steps + step).sample(turns, len(turns))
                    for side, hook in order:
                        seconds[side][hook][-1].append(_step(sides[side], WARM_UP + block * steps + step, hook))
            return seconds
        finally:
            for process in (each for side in sides for each in side):
                process.kill()
                process.wait()


def _start(python: str, rank: int, hooks: list[Hook], store: Path, seed: int) -> "subprocess.Popen[str]":
    """One rank of one installation; it imports this package's model and text from here, and its own commhooks."""
    here = Path(__file__).parents[2]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(here)}
    command = [python, str(Path(__file__).with_name("trees_rank.py")), str(rank), str(WORLD), str(store)]
    command += [json.dumps(hooks), str(seed)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)


def _step(ranks: "list[subprocess.Popen[str]]", step: int, hook: int) -> float:
    """One step of one hook on all ranks of an installation, in seconds."""
    for rank in ranks:
        assert rank.stdin is not None
        rank.stdin.write(f"{step} {hook}\n")
        rank.stdin.flush()
    taken = []
    for rank in ranks:
        assert rank.stdout is not None
        line = rank.stdout.readline()
        if not line:
            raise RuntimeError("a rank ended; its error stands above")
        taken.append(float(line))
    return max(taken)


if __name__ == "__main__":
    sys.exit(main())
