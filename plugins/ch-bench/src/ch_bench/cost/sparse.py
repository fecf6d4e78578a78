"""What the sparse hooks cost on one core, beside a cast to bf16 and back.

    OMP_NUM_THREADS=1 python -m ch_bench.cost.sparse [--record]

Of the gradient of a GPT of 10.8 M parameters, as 25 matrices in one bucket, with a residual: the time in which one rank of two
makes its message (``send``), and in which it unpacks what both sent, adds it up and keeps the rest (``deliver``), without a
network. The least of many repetitions counts. In chunks of 4093, a prime, the largest are found by ``torch.topk`` over whole
chunks, in those of 4096 in the blocks of a chunk first.
"""

import argparse
import math
import sys
import time
from collections.abc import Sequence

import torch
from rich.console import Console
from rich.table import Table

import commhooks
from ch_bench import bench_report
from ch_bench.cost.codec import NUMBERS, VECTORS, cast
from commhooks import AllGather, AllReduce, Bucket, HookState, Request, StepContext

EXPRESSIONS = (
    "topk",
    "topk(bits=2)",
    "topk(chunk=4093)",
    "topk(density=0.1)",
    "topk(density=0.1, chunk=4093)",
    "randomk",
)


class Case:
    """One rank of two that both have the same gradient.

    Args:
        expr: the hook.
        numel: elements of the gradient.

    Attributes:
        send, deliver: milliseconds on a core, of the quickest step.
    """

    def __init__(self, expr: str, numel: int) -> None:
        reduction = commhooks.create(expr).reduction
        assert reduction is not None, expr
        gradient = {str(i): torch.randn(numel // VECTORS // 64, 64) for i in range(VECTORS)}
        self.bucket, self.state = Bucket.from_tensors(gradient), HookState()
        self.reduction, self.before = reduction, self.bucket.storage.clone()
        self.ctx = StepContext(
            world_size=2, state=self.state
        )  # one: its scratch lives from step to step, as an engine's
        self.send = self.deliver = math.inf

    def step(self) -> None:
        """One step, timed."""
        self.bucket.storage.copy_(self.before)
        self.ctx.step = self.state.step
        stages = self.reduction.start(self.bucket, self.ctx)
        begun = time.thread_time()
        requests = next(stages)
        self.send = min(self.send, 1e3 * (time.thread_time() - begun))
        for request in requests if isinstance(requests, tuple) else (requests,):
            arrive(request)
        begun = time.thread_time()
        assert next(stages, None) is None, f"{self.reduction} has more than one stage"
        self.deliver = min(self.deliver, 1e3 * (time.thread_time() - begun))
        self.state.commit()


def arrive(request: Request) -> None:
    """Let both ranks have sent what this one has."""
    assert isinstance(request, AllGather | AllReduce)
    source = request.input if isinstance(request, AllGather) else request.tensor
    if isinstance(request, AllGather):
        request.output.view(2, -1).copy_(source)
    if request.sent is not None:
        request.sent.copy_(source)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; ``--record`` keeps it as docs/measured/sparse-DATE.md."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numbers", type=int, default=NUMBERS)
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--record", action="store_true", help="keep the table in docs/measured")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    console = Console(record=True, width=None if sys.stdout.isatty() else 110)
    table = Table(title=f"ms for {args.numbers / 1e6:.1f} M fp32 numbers on one core, least of {args.repetitions}")
    for name in ("", "send", "deliver", "together"):
        table.add_column(name, justify="right" if name else "left")
    there, back = cast(args.numbers, args.repetitions)
    table.add_row("cast to bf16, and back", f"{there:.1f}", f"{back:.1f}", f"{there + back:.1f}")
    cases = {expr: Case(expr, args.numbers) for expr in EXPRESSIONS}
    for _ in range(args.repetitions):  # in turn: the machine is not equally quick all the time
        for case in cases.values():
            case.step()
    for expr, case in cases.items():
        table.add_row(expr, *(f"{t:.1f}" for t in (case.send, case.deliver, case.send + case.deliver)))
    console.print(table)
    if args.record:
        command = bench_report.command("ch_bench.cost.sparse", argv, environment="OMP_NUM_THREADS=1")
        console.print(f"recorded: {bench_report.record('sparse', command, console)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
