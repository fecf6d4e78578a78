"""Writes the tables of docs/cluster.md and of the README from the predictions of ``advise --cluster``.

Start it in plugins/ch-bench by ``python -m programs.cluster_page``.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from ch_bench.advise.cluster import Cluster, Line, Training, imagined, line
from ch_bench.advise.cluster_command import hooks_for
from ch_bench.advise.outer import rounds
from ch_bench.advise.predict import choose

ROOT = Path(__file__).resolve().parents[3]
FILES = (ROOT / "docs" / "cluster.md", ROOT / "README.md")
TABLE = re.compile(r"(<!-- cluster (\d+(?: \d+)*): .*? -->\n).*?(<!-- end of cluster -->)", re.DOTALL)
"""A table, with the ranks per node that its comment names. Several numbers make a short table."""

NODES = 4
LINKS = {
    "100 Gbit/s": (100e9, 1e-4),
    "25 Gbit/s": (25e9, 1e-4),
    "10 Gbit/s": (10e9, 1e-4),
    "1 Gbit/s": (1e9, 1e-4),
    "100 Mbit/s, 80 ms round trip": (100e6, 0.08),
}
"""Bits per second that a node sends, and seconds of a round trip."""

COSTLY = "powersgd"  # left out, because its recorded cost in loss is above the noise of seeds
SLOW = 2.0  # times a step without communication; if a step with the hook takes longer, the cell has an outer optimizer, too


@dataclass(frozen=True)
class Model:
    """A model that users know, with a step without communication that is assumed."""

    title: str
    parameters: float
    dtype: torch.dtype
    step: float

    @property
    def training(self) -> Training:
        return Training(imagined(self.parameters, self.dtype, sharded=False), self.step)


MODELS = (
    Model("25 M, fp32, 100 ms", 25e6, torch.float32, 0.1),
    Model("124 M, fp32, 150 ms", 124e6, torch.float32, 0.15),
    Model("1.3 B, bf16, 250 ms", 1.3e9, torch.bfloat16, 0.25),
)
USUAL = MODELS[1]  # the model of the README


@dataclass(frozen=True)
class Cell:
    """The prediction for one cluster and model.

    Attributes:
        plain: a step of plain DDP.
        chosen: the recommended step.
        outer: an outer optimizer with its interval, and the seconds of its step; ``None`` if ``chosen`` is fast enough.
    """

    plain: Line
    chosen: Line
    outer: tuple[str, float] | None

    @property
    def short(self) -> str:
        """The hook with the time of its step and of a step of plain DDP; "none" if no hook helps."""
        if self.chosen is self.plain:
            return "none"
        return f"`{self.chosen.hook}`: {_time(self.chosen.seconds)} instead of {_time(self.plain.seconds)}"

    def __str__(self) -> str:
        made = f"{_bytes(self.plain.leaving)}, {_time(self.plain.seconds)}: "
        if self.chosen is self.plain:
            return f"{made}none"
        made += f"`{self.chosen.hook}` {_bytes(self.chosen.leaving)}, {_time(self.chosen.seconds)}"
        return made if self.outer is None else f"{made}, or {self.outer[0]} {_time(self.outer[1])}"


@cache
def cell(ranks: int, link: str, model: Model) -> Cell:
    """Predict the step of a model on four nodes."""
    bits, round_trip = LINKS[link]
    cluster, training = Cluster(NODES, ranks, bits, round_trip), model.training
    hooks = ["allreduce", *(name for name in hooks_for(cluster, training) if COSTLY not in name)]
    lines = [line(cluster, training, hook) for hook in dict.fromkeys(hooks)]
    chosen = choose(lines).chosen
    found = rounds(model.step, chosen.link, chosen.hook, chosen.seconds) if chosen.seconds > SLOW * model.step else None
    if found is None:
        return Cell(lines[0], chosen, None)
    name, _, _ = found.expression.partition("(")
    return Cell(lines[0], chosen, (f"`{name}` every {found.every} steps", found.seconds))


def long_table(ranks: int) -> Iterator[str]:
    """Yield the lines of a table with one column for each model."""
    yield f"| link of a node | {' | '.join(model.title for model in MODELS)} |"
    yield f"|---|{'---|' * len(MODELS)}"
    for link in LINKS:
        yield f"| {link} | {' | '.join(str(cell(ranks, link, model)) for model in MODELS)} |"


def short_table(ranks: list[int]) -> Iterator[str]:
    """Yield the lines of a table with one column for each number of ranks per node, for one model."""
    titles = ["one GPU per node" if each == 1 else f"{each} GPUs per node" for each in ranks]
    yield f"| link of a node | {' | '.join(titles)} |"
    yield f"|---|{'---|' * len(ranks)}"
    for link in LINKS:
        yield f"| {link} | {' | '.join(cell(each, link, USUAL).short for each in ranks)} |"


def written(text: str) -> str:
    """Return the text of a page with its tables written again."""

    def table(found: re.Match[str]) -> str:
        ranks = [int(each) for each in found[2].split()]
        lines = long_table(ranks[0]) if len(ranks) == 1 else short_table(ranks)
        return found[1] + "".join(f"{each}\n" for each in lines) + found[3]

    return TABLE.sub(table, text)


def _bytes(size: float) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.{0 if size >= 1e7 else 1}f} MB"


def _time(seconds: float) -> str:
    return f"{seconds:.{0 if seconds >= 10 else 1}f} s" if seconds >= 1 else f"{seconds * 1e3:.0f} ms"


if __name__ == "__main__":
    for file in FILES:
        file.write_text(written(file.read_text()))
