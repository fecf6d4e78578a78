"""What PowerSGD's passes over the gradient cost without any message, and what other ways to make them would.

    OMP_NUM_THREADS=1 python -m ch_bench.cost.passes --out docs/measured/powersgd-passes.md

As many processes as there are ranks work at once, since cores share the memory. Each makes the passes of a step on the
matrices of the GPT of 10.7 M parameters, in blocks of rows, with torch alone: ch-powersgd's own code is timed by
``ch_bench.cost.bench``. Medians in milliseconds, of the slower process. Ways:

* ``project``: ``D = G + e``, ``P = D Q``; ``back``: ``Q_i = D^T P``; ``decode``: ``e' = D - P Q_i^T``, ``G = P Q^T``;
* ``back, cold``: the second product of whole matrices, without bringing each block into the cache first;
* ``carried``: the residual never written: ``D' = G + (D - P Q_i^T)`` in ``project``, and ``G = P Q^T`` alone in ``decode``.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path

import torch
import torch.distributed as dist

from ch_bench.bench_report import command, digits, heading
from ch_bench.shapes import gpt_shapes
from commhooks.testing import spawn

BLOCKS = (1 << 16, 3 << 15, 1 << 17, 3 << 16)  # elements
WAYS = ("project", "back", "back_cold", "decode", "carried_project", "carried_in_place", "carried_decode")
SUMS = {
    "project, back, decode": ("project", "back", "decode"),
    "carried": ("carried_project", "back", "carried_decode"),
    "carried in place": ("carried_in_place", "back", "carried_decode"),
}


class Passes:
    """The matrices of one rank, cut into blocks of about ``block`` elements, and the passes over them."""

    def __init__(self, shapes: Sequence[tuple[int, int]], rank: int, block: int) -> None:
        cuts = []
        for rows, cols in shapes:
            each = -(-rows // max(1, round(rows * cols / block)))
            cuts.append([min(each, rows - at) for at in range(0, rows, each)])

        def matrices() -> list[tuple[torch.Tensor, ...]]:
            return [torch.randn(shape).mul_(1e-3).split(cut) for shape, cut in zip(shapes, cuts, strict=True)]

        self.g, self.e, self.kept = matrices(), matrices(), matrices()
        self.p = [torch.randn(rank, rows).mul_(rows**-0.5) for rows, _ in shapes]
        self.q = [torch.randn(rank, cols).mul_(cols**-0.5) for _, cols in shapes]
        self.left = [p.mT.split(cut) for p, cut in zip(self.p, cuts, strict=True)]
        self.whole = [torch.randn(shape) for shape in shapes]
        self.made = [torch.empty_like(q) for q in self.q]
        self.outer: Callable[..., torch.Tensor] = torch.mul if rank == 1 else torch.mm
        self.vectors = rank == 1

    def shrink(self) -> None:
        """Keep the numbers small over many repetitions."""
        torch._foreach_mul_([one for part in (self.g, self.kept) for each in part for one in each], 1e-3)
        torch._foreach_div_(self.p, [p.norm(dim=1, keepdim=True) for p in self.p])

    def _blocks(self, *lists: Sequence[Sequence[torch.Tensor]]) -> Iterator[tuple[torch.Tensor, ...]]:
        for number, q in enumerate(self.q):
            for parts in zip(*(one[number] for one in lists), strict=True):
                yield q, *parts

    def _less(self, d: torch.Tensor, p: torch.Tensor, q: torch.Tensor, out: torch.Tensor) -> None:
        if self.vectors:
            torch.addcmul(d, p, q, value=-1, out=out)
        else:
            torch.addmm(d, p, q, alpha=-1, out=out)

    def project(self) -> None:
        for q, g, e, p in self._blocks(self.g, self.e, self.left):
            torch.mm(g.add_(e), q.mT, out=p)

    def back(self) -> None:
        for p, blocks, out in zip(self.left, self.g, self.made, strict=True):
            out.zero_()
            for left, d in zip(p, blocks, strict=True):
                d.sum()
                out.addmm_(left.mT, d)

    def back_cold(self) -> None:
        for p, d, out in zip(self.p, self.whole, self.made, strict=True):
            torch.mm(p, d, out=out)

    def decode(self) -> None:
        for q, g, e, p in self._blocks(self.g, self.kept, self.left):
            self._less(g, p, q, out=e)
            self.outer(p, q, out=g)

    def carried_project(self) -> None:
        """``kept`` is the D of the step before, ``e`` the new one: both stay, since a step may be rolled back."""
        for q, g, d, new, p in self._blocks(self.g, self.kept, self.e, self.left):
            self._less(d, p, q, out=new)
            torch.mm(new.add_(g), q.mT, out=p)

    def carried_in_place(self) -> None:
        for q, g, d, p in self._blocks(self.g, self.kept, self.left):
            self._less(d, p, q, out=d)
            torch.mm(d.add_(g), q.mT, out=p)

    def carried_decode(self) -> None:
        for q, g, p in self._blocks(self.g, self.left):
            self.outer(p, q, out=g)


def measure(rank: int, world: int, small: bool) -> list[tuple[int, int, dict[str, float]]]:
    """Rank of the factors, block, and seconds of each way: one process."""
    torch.set_num_threads(1)
    layers, width, repetitions = (1, 128, 2) if small else (6, 384, 25)
    matrices = [s for s in gpt_shapes(layers, width, 65, 64).values() if len(s) == 2 and min(s) > 65]
    found = []
    for columns, block in product((1, 4), BLOCKS):
        passes = Passes([(rows, cols) for rows, cols in matrices], columns, block)
        times: dict[str, list[float]] = {way: [] for way in WAYS}
        for _ in range(repetitions):
            for way in WAYS:
                dist.barrier()
                begun = time.perf_counter()
                getattr(passes, way)()
                times[way].append(time.perf_counter() - begun)
            passes.shrink()
        found.append((columns, block, {way: statistics.median(each) for way, each in times.items()}))
    return found


def table(ranks: int, small: bool) -> str:
    """The slower process of each cell, as Markdown."""
    heads = [*(way.replace("_", " ") for way in WAYS), *("all of " + name for name in SUMS)]
    lines = [f"| rank | block | {' | '.join(heads)} |", "|--:|--:|" + "--:|" * len(heads)]
    for cells in zip(*spawn(measure, ranks, small, timeout=600), strict=True):
        columns, block, _ = cells[0]
        ms = {way: 1e3 * max(times[way] for _, _, times in cells) for way in WAYS}
        shown = map(digits, (*ms.values(), *(sum(ms[way] for way in ways) for ways in SUMS.values())))
        lines.append(f"| {columns} | {block >> 10} Ki | {' | '.join(shown)} |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    """Measure, print, and keep with ``--out``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="tiny shapes, few repetitions")
    parser.add_argument("--ranks", type=int, default=2, help="processes that work at once")
    parser.add_argument("--out", type=Path, help="write the table, with machine and versions, to this file")
    chosen = parser.parse_args(argv)
    found = table(chosen.ranks, chosen.small)
    print(found)
    if chosen.out is not None:
        about = heading("PowerSGD's passes", command("ch_bench.cost.passes", argv, environment="OMP_NUM_THREADS=1"))
        chosen.out.write_text(f"{about}\n{__doc__}\n{found}\n")


if __name__ == "__main__":
    main()
