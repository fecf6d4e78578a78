"""How the error of a 16-bit reduce-scatter grows with the number of ranks, with and without fp32 accumulation.

    python -m ch_bench.cost.fsdp_accumulation [--worlds 2 8 64] [--numel 65536] [--record]

Every rank has a gradient of its own: a part common to all ranks and noise of the same size. The reduce-scatters run
through the engine over simulated ranks, whose 16-bit sums are made one rank after another, as a ring makes them. The
error is that of the reduced gradient against the float64 average, relative to its norm. Writes the plot and the table
beside this file; nothing but a CPU is needed.
"""

import argparse
import sys
from pathlib import Path

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from ch_bench import bench_report
from ch_bench.checkout import docs
from ch_fsdp import flat_bucket, flat_version
from commhooks import Plain, Reduction, WireCast
from commhooks.simulate import SimulatedRank, simulate

HERE = docs() / "measured"
HOOKS: dict[str, Reduction] = {
    "fp32": Plain(),
    "fp16": WireCast(Plain(), "fp16"),
    "bf16": WireCast(Plain(), "bf16"),
    "bf16, fp32 accumulation": WireCast(Plain(), "bf16", accumulate="fp32"),
    "bf16, fp32 accumulation, stochastic": WireCast(Plain(), "bf16", accumulate="fp32", rounding="stochastic"),
}


def gradient(rank: int, numel: int) -> torch.Tensor:
    """fp32, 1-D: the common part and this rank's noise."""
    common = torch.randn(numel, generator=torch.Generator().manual_seed(0))
    return common + torch.randn(numel, generator=torch.Generator().manual_seed(1 + rank))


def error(reduction: Reduction, world: int, numel: int) -> float:
    """Relative error of the average over ``world`` simulated ranks, in the 2-norm."""
    numel -= numel % world
    exact = sum(gradient(rank, numel).double() for rank in range(world)) / world

    def body(rank: SimulatedRank) -> torch.Tensor:
        torch.manual_seed(rank.rank)
        flat, whole = flat_version(reduction, scatter=True)
        flat.op, flat.output = "mean", torch.empty(numel // world)
        engine = rank.engine(whole)
        engine.run(flat_bucket("flat", gradient(rank.rank, numel)))
        failed = engine.finish()
        if failed is not None:
            raise failed
        return flat.output

    result = torch.cat(simulate(world, body)).double()
    return float((result - exact).norm() / exact.norm())


def measure(worlds: list[int], numel: int) -> dict[str, list[float]]:
    """Hook -> error at each world size."""
    return {name: [error(reduction, world, numel) for world in worlds] for name, reduction in HOOKS.items()}


def table(worlds: list[int], errors: dict[str, list[float]]) -> Table:
    """One row per hook; the last column is the growth from the smallest world to the largest."""
    found = Table(title="relative error of a reduce-scatter against float64", box=box.SIMPLE)
    found.add_column("on the wire")
    for heading in (*(f"{world} ranks" for world in worlds), "growth"):
        found.add_column(heading, justify="right")
    for name, row in errors.items():
        found.add_row(name, *(f"{value:.2e}" for value in row), f"{row[-1] / row[0]:.2f}")
    return found


def markdown(worlds: list[int], errors: dict[str, list[float]]) -> str:
    """The same as a page."""
    rows = [
        "# Error of a 16-bit reduce-scatter against the number of ranks",
        "",
        "Made by `python -m ch_bench.cost.fsdp_accumulation` (simulated ranks); relative to the float64 average.",
        "",
        f"| on the wire | {' | '.join(f'{w} ranks' for w in worlds)} | growth |",
        f"| --- |{' --- |' * (len(worlds) + 1)}",
        *(
            f"| {name} | {' | '.join(f'{v:.2e}' for v in row)} | {row[-1] / row[0]:.2f} |"
            for name, row in errors.items()
        ),
        "",
        "![error against world size](fsdp_accumulation.png)",
    ]
    return "\n".join(rows) + "\n"


def plot(worlds: list[int], errors: dict[str, list[float]], path: Path) -> None:
    """Error against world size, both axes logarithmic."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
    for name, row in errors.items():
        axes.loglog(worlds, row, marker="o", label=name)
    axes.set(xlabel="ranks", ylabel="relative error against float64", xticks=worlds, xticklabels=map(str, worlds))
    axes.minorticks_off()
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 8, 64])
    parser.add_argument("--numel", type=int, default=65_536)
    parser.add_argument("--out", type=Path, default=HERE, help="where plot and table go")
    parser.add_argument("--record", action="store_true", help="keep the output as docs/measured/NAME-DATE.md")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)  # the ranks are threads
    console = Console(record=True, width=110)
    errors = measure(args.worlds, args.numel)
    console.print(table(args.worlds, errors))
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "fsdp_accumulation.md").write_text(markdown(args.worlds, errors))
    plot(args.worlds, errors, args.out / "fsdp_accumulation.png")
    if args.record:
        command = bench_report.command("ch_bench.cost.fsdp_accumulation", argv)
        console.print(f"recorded in {bench_report.record('fsdp-accumulation', command, console)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
