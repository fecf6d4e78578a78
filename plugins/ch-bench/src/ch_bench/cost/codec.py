"""What packing and unpacking cost on one core, beside a cast to bf16 and back.

    OMP_NUM_THREADS=1 python -m ch_bench.cost.codec [--record]

Of the gradient of a GPT of 10.8 M parameters (as many numbers as fit into whole blocks), for each width and option: the
time in which one rank of two packs both parts (``send``), sums its own of two ranks and packs the sum (``share``), and
unpacks everything (``deliver``), of one bucket without a network. The least of many repetitions counts: whatever else
the machine does can only add to it.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from ch_bench import bench_report
from ch_quant import Codec, Exchange, Feedback
from commhooks import StepContext

NUMBERS = 10_747_904  # the matrices of the GPT that `ch_bench.cost.bench` trains, in whole blocks of 128
VECTORS = 25  # of equal size, as many matrices as that GPT has


class Row(NamedTuple):
    """A line of the table."""

    label: str
    bits: int
    rotated: bool = False
    feedback: bool = False
    rounding: Literal["nearest", "stochastic"] = "nearest"


ROWS = (
    Row("quant8", 8),
    Row("quant4", 4),
    Row("quant4, error feedback", 4, feedback=True),
    Row("quant4, hadamard", 4, rotated=True),
    Row("quant4, stochastic", 4, rounding="stochastic"),
    Row("quant(bits=3)", 3),
    Row("quant2", 2),
    Row("sign", 1),
)


def least(action: Callable[[], object], repetitions: int) -> float:
    """Milliseconds on a core of the quickest of several calls; the time that a loaded machine has it wait is left out."""
    times = []
    for _ in range(repetitions):
        begun = time.thread_time()
        action()
        times.append(time.thread_time() - begun)
    return 1e3 * min(times)


def cast(numel: int, repetitions: int) -> tuple[float, float]:
    """A cast to bf16, and back."""
    x, small = torch.randn(numel), torch.empty(numel, dtype=torch.bfloat16)
    return least(lambda: small.copy_(x), repetitions), least(lambda: x.copy_(small), repetitions)


def stages(numel: int, row: Row, repetitions: int) -> tuple[float, float, float]:
    """Milliseconds of ``send``, ``share`` and ``deliver`` of one rank of two."""
    each = numel // VECTORS // 128 * 128
    vectors = list(torch.randn(VECTORS, each).unbind(0))
    kept = [torch.zeros_like(v) for v in vectors]
    codec, ctx = Codec(row.bits, 128, row.rounding), StepContext(world_size=2)
    exchange = Exchange(codec, [each] * VECTORS, ctx, torch.device("cpu"), parts=2, rotated=row.rotated)
    fed = Feedback([torch.zeros_like(v) for v in vectors], kept) if row.feedback else None
    parts = [vectors, vectors]
    both = [fed] * 2 if fed is not None else None
    first = exchange.send(parts, both)
    first.output.copy_(first.input)
    second = exchange.share(fed)
    second.output.view(2, -1).copy_(second.input)
    return (
        least(lambda: exchange.send(parts, both), repetitions),
        least(lambda: exchange.share(fed), repetitions),
        least(lambda: exchange.deliver(parts), repetitions),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; ``--record`` keeps it as docs/measured/codec-DATE.md."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numbers", type=int, default=NUMBERS)
    parser.add_argument("--repetitions", type=int, default=40)
    parser.add_argument("--record", action="store_true", help="keep the table in docs/measured")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    console = Console(record=True, width=None if sys.stdout.isatty() else 110)
    table = Table(
        title=f"ms of a core for {args.numbers / 1e6:.1f} M fp32 numbers on one core, least of {args.repetitions}"
    )
    for name in ("", "send", "share", "deliver", "together"):
        table.add_column(name, justify="right" if name else "left")
    there, back = cast(args.numbers, args.repetitions)
    table.add_row("cast to bf16, and back", f"{there:.1f}", "", f"{back:.1f}", f"{there + back:.1f}")
    for row in ROWS:
        times = stages(args.numbers, row, args.repetitions)
        table.add_row(row.label, *(f"{t:.1f}" for t in (*times, sum(times))))
    console.print(table)
    if args.record:
        command = bench_report.command("ch_bench.cost.codec", argv, environment="OMP_NUM_THREADS=1")
        console.print(f"recorded: {bench_report.record('codec', command, console)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
