"""Text without a download: Python's own documentation, one symbol per character.

``pydoc_data.topics`` is the text of ``help("FORMATTING")`` and others, about 460 000 characters. Every tenth block of
4096 characters is held out. Both parts therefore cover all topics, and the split needs no seed.
"""

from dataclasses import dataclass
from pydoc_data.topics import topics

import torch

BLOCK = 4096  # characters per unit of the split


@dataclass(frozen=True)
class Text:
    """The corpus as symbol numbers: two int64 vectors and the number of symbols."""

    train: torch.Tensor  # (characters,)
    val: torch.Tensor  # (characters,)
    vocab: int


def load() -> Text:
    """Read the corpus of this interpreter. Its size depends on the Python version."""
    text = "\n".join(topics[name] for name in sorted(topics))
    symbols = {c: i for i, c in enumerate(sorted(set(text)))}
    data = torch.tensor([symbols[c] for c in text], dtype=torch.int64, device="cpu")
    blocks = data.split(BLOCK)
    train = torch.cat([b for i, b in enumerate(blocks) if i % 10 != 9])
    return Text(train, torch.cat(blocks[9::10]), len(symbols))


class Batches:
    """Random windows of the training text, different on each rank and equal for every hook.

    ``batches[step]`` is ``(x, y)``, both ``(batch, context)``. It depends only on (seed, rank, step), so that compared
    hooks see the same data.
    """

    def __init__(self, data: torch.Tensor, batch: int, context: int, rank: int, seed: int) -> None:
        self.data, self.batch, self.context = data, batch, context
        self.base = seed * 1_000_003 + rank * 7919

    def __getitem__(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(self.base + step * 104_729)
        starts = torch.randint(
            len(self.data) - self.context - 1, (self.batch, 1), generator=generator, dtype=torch.int64, device="cpu"
        )
        window = self.data[starts + torch.arange(self.context + 1, dtype=torch.int64, device="cpu")]
        return window[:, :-1], window[:, 1:]


def validation(data: torch.Tensor, context: int, windows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``windows`` evenly spaced windows of held-out text: ``(x, y)``, both ``(windows, context)``."""
    starts = torch.linspace(0, len(data) - context - 2, windows, dtype=torch.float32, device="cpu").long()[:, None]
    window = data[starts + torch.arange(context + 1, dtype=torch.int64, device="cpu")]
    return window[:, :-1], window[:, 1:]
