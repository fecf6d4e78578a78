"""Real text with nothing to download: Python's own documentation, one symbol per character.

``pydoc_data.topics`` is what ``help("FORMATTING")`` prints, about 460 000 characters. Every tenth block of 4096
characters is held out for validation, so both parts cover all topics and the split never depends on a seed.
"""

from dataclasses import dataclass
from pydoc_data.topics import topics

import torch

BLOCK = 4096  # characters per unit of the split


@dataclass(frozen=True)
class Text:
    """The corpus as symbol numbers: two int64 vectors, and how many different symbols there are."""

    train: torch.Tensor  # (characters,)
    val: torch.Tensor  # (characters,)
    vocab: int


def load() -> Text:
    """Read the corpus of this interpreter (its size changes a little with the Python version)."""
    text = "\n".join(topics[name] for name in sorted(topics))
    symbols = {c: i for i, c in enumerate(sorted(set(text)))}
    data = torch.tensor([symbols[c] for c in text])
    blocks = data.split(BLOCK)
    train = torch.cat([b for i, b in enumerate(blocks) if i % 10 != 9])
    return Text(train, torch.cat(blocks[9::10]), len(symbols))


class Batches:
    """Random windows of the training text, each rank its own, the same for every hook.

    ``batches[step]`` is ``(x, y)``, both ``(batch, context)``, and depends on (seed, rank, step) only: hooks that are
    compared see the same data, whatever order they run in.
    """

    def __init__(self, data: torch.Tensor, batch: int, context: int, rank: int, seed: int) -> None:
        self.data, self.batch, self.context = data, batch, context
        self.base = seed * 1_000_003 + rank * 7919

    def __getitem__(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(self.base + step * 104_729)
        starts = torch.randint(len(self.data) - self.context - 1, (self.batch, 1), generator=generator)
        window = self.data[starts + torch.arange(self.context + 1)]
        return window[:, :-1], window[:, 1:]


def validation(data: torch.Tensor, context: int, windows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """``windows`` evenly spaced windows of held-out text: ``(x, y)``, both ``(windows, context)``."""
    starts = torch.linspace(0, len(data) - context - 2, windows).long()[:, None]
    window = data[starts + torch.arange(context + 1)]
    return window[:, :-1], window[:, 1:]
