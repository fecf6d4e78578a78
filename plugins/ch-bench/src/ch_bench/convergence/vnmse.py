"""Error of one exchange on gradients from training, at 8 to 1 bits and in bf16.

    OMP_NUM_THREADS=1 python -m ch_bench.convergence.vnmse [--record]

``vNMSE = |result - mean|^2 / |mean|^2`` over all numbers that a hook compresses, with the mean over W = 4 ranks in fp64. (All
hooks average norms, biases and small parameters exactly.) The gradients are those of the study's GPT (Adam) and CNN (SGD) at
three steps of an exact run; the figure is the mean over the steps. A third set is normal numbers, independent on each rank. The
square of their mean is a quarter of one rank's square, and so is the error of the first stage.

"One stage" is the all-to-all with the sum, a reduce-scatter. "Both" is the whole all-reduce.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path

import matplotlib
import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

import commhooks
from ch_bench import record
from ch_bench.convergence.tasks import SETTINGS, TASKS, Task
from ch_quant import Quantized, TwoStageExchange
from commhooks import Bucket, BucketLayout, Reduction, Stages, StepContext
from commhooks.testing import SimulatedRanks

RANKS, SMALLEST = 4, 128
STEPS = {"gpt": (5, 40, 120), "cnn": (5, 60, 200)}
Gradients = list[dict[str, torch.Tensor]]  # of every rank, by parameter
MIXED = {  # 8 bits for about a quarter of the numbers, 4 bits for the others
    "GPT": "policy({'*.qkv.weight': quant8, '*': quant4%s})",
    "CNN": "policy({'[0-4].weight': quant8, '*': quant4%s})",
    "normal": "policy({'a': quant8, '*': quant4%s})",
}
ROWS = [  # label, bits in the plot, expression; %s is the option of the rotation
    ("bf16", 16.0, "bf16_compress"),
    ("bf16, fp32 sums", 16.0, "bf16_compress(accumulate='fp32')"),
    ("8 bits", 8.0, "quant8%s"),
    ("5 bits (8, 4)", 5.0, ""),
    ("4 bits", 4.0, "quant4%s"),
    ("3 bits", 3.0, "quant(bits=3)%s"),
    ("2 bits", 2.0, "quant2(error_feedback=False)%s"),
    ("1 bit", 1.0, "sign(error_feedback=False)%s"),
]


class FirstStage(Reduction):
    """The first stage of a quantized average: returns this rank's part of the mean, and zeros elsewhere."""

    name, lossy, granularity = "first_stage", True, "bucket"
    collectives = frozenset({"all_to_all"})

    def __init__(self, whole: Quantized) -> None:
        self.whole = whole

    def run(self, bucket: Bucket, ctx: StepContext) -> Stages:
        vectors = [bucket.matrix(p).view(-1) for p in bucket.params]
        exchange = TwoStageExchange(
            self.whole.codec,
            [len(v) for v in vectors],
            ctx,
            bucket.device,
            parts=ctx.world_size,
            rotated=self.whole.rotation is not None,
        )
        yield exchange.send([vectors] * ctx.world_size)
        for vector in vectors:
            vector.zero_()
        exchange.take(vectors)


def exact_run(task: str) -> Iterator[Gradients]:
    """Yield every rank's compressible gradients in each step of an exact run."""
    made = TASKS[task](SETTINGS[task], 0, "iid")
    assert isinstance(made, Task)
    optimizer, params = made.optimizer(), dict(made.model.named_parameters())
    for step in range(SETTINGS[task].steps):
        every = [torch.autograd.grad(made.loss(made.model, r, step), list(params.values())) for r in range(RANKS)]
        named = [dict(zip(params, one, strict=True)) for one in every]
        yield [{n: g for n, g in one.items() if g.dim() > 1 and g.numel() >= SMALLEST} for one in named]
        for number, p in enumerate(params.values()):
            p.grad = torch.stack([one[number] for one in every]).mean(0)
        optimizer.step()


def recorded(task: str) -> list[Gradients]:
    """Return the gradients at `STEPS`."""
    return [found for step, found in enumerate(islice(exact_run(task), max(STEPS[task]) + 1)) if step in STEPS[task]]


def normal(seed: int = 0) -> list[Gradients]:
    """Return independent normal numbers, a quarter of them in ``a``."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"a": (256, 256), "b": (384, 512)}
    return [
        [
            {n: torch.randn(s, generator=generator, dtype=torch.float32, device="cpu") for n, s in shapes.items()}
            for _ in range(RANKS)
        ]
    ]


def error(samples: list[Gradients], make: "partial[commhooks.CommHook]", part: bool = False) -> tuple[float, float]:
    """Return the mean vNMSE of the samples, and bits per number and round.

    Args:
        samples: gradients of every rank.
        make: returns a handle of the hook.
        part: True if each rank returns only its part of the result.
    """
    found = 0.0
    for every in samples:
        ranks = SimulatedRanks(make, RANKS, every[0], buckets=1)
        step = ranks.step(every)
        for failure in step.errors:
            if failure is not None:
                raise failure
        results = step.gradients if part else step.gradients[:1]
        apart = size = 0.0
        for name in every[0]:
            mean = torch.stack([one[name].double() for one in every]).mean(0)
            result = torch.stack([one[name].double() for one in results]).sum(0)
            apart, size = apart + float((result - mean).square().sum()), size + float(mean.square().sum())
        found += apart / size / len(samples)
    numbers = sum(g.numel() for g in samples[0][0].values())
    reduction = commhooks.create(make().built).reduction
    assert reduction is not None
    plan = reduction.plan(BucketLayout.of_tensors(samples[0][0]), StepContext(world_size=RANKS))
    payload = sum(request.payload_bytes for stage in plan for request in stage)
    return found, 8 * payload / numbers / max(1, len(plan))


def handle(expr: str, first: bool) -> commhooks.CommHook:
    """Return a handle of an expression, or of the first stage of its hook."""
    made = commhooks.create(expr)
    if not first:
        return made
    assert isinstance(made.reduction, Quantized)
    return commhooks.create(FirstStage(made.reduction))


def expression(template: str, data: str, rotated: bool) -> str:
    """Return a row's expression for a data set."""
    option = "rotation='hadamard'"
    text = template or MIXED[data]
    if "%s" not in text:
        return text
    return (text % (f"({option})" if rotated else "")).replace(")(", ", ")


Figures = dict[tuple[str, str, bool, bool], float]  # row, data, rotated, first stage only -> vNMSE


def measure(data: dict[str, list[Gradients]]) -> tuple[Figures, dict[str, float]]:
    """Return all errors, and the bits of each row on the first data set."""
    figures: Figures = {}
    bits: dict[str, float] = {}
    for label, _, template in ROWS:
        for name, samples in data.items():
            for rotated in (False, True):
                expr = expression(template, name, rotated)
                if rotated and expr == expression(template, name, False):
                    continue
                for first in (False, True):
                    if first and not expr.startswith(("quant", "sign")):
                        continue
                    made = error(samples, partial(handle, expr, first), first)
                    figures[label, name, rotated, first] = made[0]
                    if not first and name == next(iter(data)):
                        bits.setdefault(label, made[1])
    return figures, bits


def table(figures: Figures, bits: dict[str, float], data: Sequence[str]) -> Table:
    """Return the table: rows of `ROWS`, columns by data and rotation."""
    made = Table(title=f"vNMSE of one exchange, W = {RANKS}: one stage | both stages; bits with scales")
    made.add_column("")
    made.add_column("bits", justify="right")
    for name in data:
        made.add_column(name, justify="right")
        made.add_column(f"{name}, rotated", justify="right")

    def cell(label: str, name: str, rotated: bool) -> str:
        both, one = figures.get((label, name, rotated, False)), figures.get((label, name, rotated, True))
        if both is None:
            return ""
        return (f"{one:.2e} | " if one is not None else "") + f"{both:.2e}"

    for label, _, _ in ROWS:
        made.add_row(
            label, f"{bits[label]:.3g}", *(cell(label, name, rotated) for name in data for rotated in (False, True))
        )
    return made


def draw(figures: Figures, data: Sequence[str], path: Path) -> None:
    """Draw the error of both stages against bits, one line for each kind of data and rotation."""
    with matplotlib.rc_context({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(7, 5), layout="constrained")
        axes = figure.subplots()
        for name, colour in zip(data, ("#0072b2", "#d55e00", "#999999"), strict=False):
            for rotated, dash in ((False, "-"), (True, "--")):
                points = [(b, figures.get((label, name, rotated, False))) for label, b, _ in ROWS if b < 16]
                line = [(b, f) for b, f in points if f is not None]
                label = name + (", rotated" if rotated else "")
                axes.plot(*zip(*line, strict=True), color=colour, linestyle=dash, marker="o", markersize=4, label=label)
            exact = figures["bf16", name, False, False]
            axes.axhline(exact, color=colour, linewidth=0.8, linestyle=":")
        axes.set(yscale="log", xlabel="bits of a code", xticks=[1, 2, 3, 4, 5, 8])
        axes.set_ylabel("vNMSE of the whole exchange (dotted: bf16)")
        axes.set_title(f"Error of one quantized all-reduce, {RANKS} ranks", loc="left", fontweight="bold")
        axes.grid(color="#e4e4e4", linewidth=0.8)
        axes.legend(frameon=False)
        figure.savefig(path, dpi=110)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/vnmse"), help="folder of the picture")
    parser.add_argument("--record", action="store_true", help="write table and plot to docs/measured/vnmse.*")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    console = Console(record=True, width=None if sys.stdout.isatty() else 196)
    data = {"GPT": recorded("gpt"), "CNN": recorded("cnn"), "normal": normal()}
    figures, bits = measure(data)
    console.print(table(figures, bits, list(data)))
    folder = record.measured() if args.record else args.out
    folder.mkdir(parents=True, exist_ok=True)
    draw(figures, list(data), folder / "vnmse.png")
    if args.record:
        made_by = record.command("ch_bench.convergence.vnmse", argv, environment="OMP_NUM_THREADS=1")
        title = "Error of one exchange, and of sums over many steps"
        record.write("vnmse", title, made_by, f"{record.printed(console)}\n\n![vnmse](vnmse.png)")
    return 0


if __name__ == "__main__":
    record.run_main(main)
