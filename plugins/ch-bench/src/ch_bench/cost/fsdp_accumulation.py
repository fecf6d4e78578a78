"""Error of a 16-bit reduce-scatter by the number of ranks, with and without fp32 accumulation.

    python -m ch_bench.cost.fsdp_accumulation [--worlds 2 8 64] [--numel 65536] [--record]

Every rank's gradient is a common part plus noise of the same size. The reduce-scatters run through the engine over simulated
ranks, which add up one rank after another, as a ring does. The error is relative to the norm of the float64 average.
"""

import argparse
from pathlib import Path

import torch

from ch_bench import record
from ch_fsdp import flat_bucket, flat_version
from commhooks import Plain, Reduction, WireCast
from commhooks.simulate import SimulatedRank, simulate

HOOKS: dict[str, Reduction] = {
    "fp32": Plain(),
    "fp16": WireCast(Plain(), "fp16"),
    "bf16": WireCast(Plain(), "bf16"),
    "bf16, fp32 accumulation": WireCast(Plain(), "bf16", accumulate="fp32"),
    "bf16, fp32 accumulation, stochastic": WireCast(Plain(), "bf16", accumulate="fp32", rounding="stochastic"),
}


def gradient(rank: int, numel: int) -> torch.Tensor:
    """Return a common part plus this rank's noise, fp32, 1-D."""
    common = torch.randn(numel, generator=torch.Generator().manual_seed(0), dtype=torch.float32, device="cpu")
    return common + torch.randn(
        numel, generator=torch.Generator().manual_seed(1 + rank), dtype=torch.float32, device="cpu"
    )


def error(reduction: Reduction, world: int, numel: int) -> float:
    """Return the relative error of the average over ``world`` simulated ranks, in the 2-norm."""
    numel -= numel % world
    exact = sum(gradient(rank, numel).double() for rank in range(world)) / world

    def body(rank: SimulatedRank) -> torch.Tensor:
        torch.manual_seed(rank.rank)
        flat, whole = flat_version(reduction, scatter=True)
        flat.op, flat.output = "mean", torch.empty(numel // world, dtype=torch.float32, device="cpu")
        engine = rank.engine(whole)
        engine.run(flat_bucket("flat", gradient(rank.rank, numel)))
        failed = engine.finish()
        if failed is not None:
            raise failed
        return flat.output

    result = torch.cat(simulate(world, body)).double()
    return float((result - exact).norm() / exact.norm())


def table(worlds: list[int], errors: dict[str, list[float]]) -> str:
    """Return the errors as Markdown; the last column is the growth from the smallest world to the largest."""
    rows = [[name, *(f"{v:.2e}" for v in row), f"{row[-1] / row[0]:.2f}"] for name, row in errors.items()]
    return record.markdown_table(["on the wire", *(f"{w} ranks" for w in worlds), "growth"], rows)


def draw(worlds: list[int], errors: dict[str, list[float]], path: Path) -> None:
    """Plot error against world size, both axes logarithmic."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for name, row in errors.items():
        axes.loglog(worlds, row, marker="o", label=name)
    axes.set(xlabel="ranks", ylabel="relative error against float64", xticks=worlds, xticklabels=map(str, worlds))
    axes.minorticks_off()
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=120)


def main(argv: list[str] | None = None) -> None:
    """Measure, print and plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 8, 64])
    parser.add_argument("--numel", type=int, default=65_536)
    parser.add_argument("--out", type=Path, default=Path("."), help="folder for the plot")
    parser.add_argument("--record", action="store_true", help="write table and plot to docs/measured/fsdp.md")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)  # the ranks are threads
    errors = {name: [error(reduction, world, args.numel) for world in args.worlds] for name, reduction in HOOKS.items()}
    found = table(args.worlds, errors)
    print(found)
    folder = record.measured() if args.record else args.out
    folder.mkdir(parents=True, exist_ok=True)
    draw(args.worlds, errors, folder / "fsdp-accumulation.png")
    if args.record:
        picture = "![error against the number of ranks](fsdp-accumulation.png)"
        made_by = record.command("ch_bench.cost.fsdp_accumulation", argv)
        record.write("fsdp", "Error of a 16-bit sum", made_by, f"{found}\n\n{picture}")


if __name__ == "__main__":
    record.run_main(main)
