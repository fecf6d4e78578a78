"""Models of 5 to 30 million parameters with odd shapes, and gradients that any rank can compute for every rank.

Numbers are handled in the order of memory. A turned parameter ``(n, m)`` is stored as ``(m, n)``.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch.nn.parallel import DistributedDataParallel

import ch_core.sizes
import ch_powersgd.sizes
import ch_quant.sizes
import ch_sparse.sizes
from ch_core.engine.schedule import TUNED

OBJECTS = (TUNED, ch_core.sizes.SIZES, ch_powersgd.sizes.SIZES, ch_quant.sizes.SIZES, ch_sparse.sizes.SIZES)
"""Every object that holds the sizes of a package."""
MODELS = {"5 M": 5_000_000, "13 M": 13_000_000, "28 M": 28_000_000}
POOL = 16_000_057


@dataclass(frozen=True)
class Shape:
    """A parameter.

    Attributes:
        memory: its shape in the order of memory.
        turned: True if the parameter is the transposed of a matrix of this shape.
    """

    memory: tuple[int, ...]
    turned: bool = False

    @property
    def numel(self) -> int:
        return math.prod(self.memory)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.memory[::-1] if self.turned else self.memory

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """Return numbers in the order of memory as a view that has the parameter's shape."""
        return flat.view(self.memory).t() if self.turned else flat.view(self.memory)

    def flat(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the numbers of a tensor in the order of memory. It has the parameter's shape, or lies in that order."""
        return (tensor.t() if self.turned and tensor.shape == self.shape else tensor).reshape(-1)


def constants() -> list[int]:
    """Return every size constant of the packages that a parameter can have as its number of elements."""
    values = [getattr(one, field.name) for one in OBJECTS for field in fields(one)]
    return sorted({int(value) for value in values if value is not None and 16 <= value <= 1 << 22})


def draw(rng: random.Random, size: str) -> list[Shape]:
    """Return the parameters of a model of about ``MODELS[size]`` elements, in random order."""
    wanted = MODELS[size]
    shapes = [Shape(()), Shape((rng.choice((1, 2, 3)),)), Shape((_prime(rng.randrange(1000, 200_000)),))]
    # One large matrix, as an embedding. DDP never cuts a parameter, so its bucket is at least as long.
    shapes.append(Shape((_prime(rng.randrange(wanted // 4000, wanted // 2500)), rng.choice((769, 1021, 1024)))))
    for off in (-1, 0, 1):
        numel = rng.choice(constants()) + off
        shapes.append(Shape(rng.choice(((numel,), (1, numel), (numel, 1)))))
    while sum(shape.numel for shape in shapes) < wanted:
        rows, cols = rng.randrange(3, 2000), rng.choice((1, 2, 3, 127, 128, 129, 511, 640, 1019))
        kinds = [Shape((rows, cols)), Shape((rows // 8 + 1, 64, 3, 3)), Shape((rows,))]
        if rows != cols:
            kinds.append(Shape((rows, cols), turned=True))
        shapes.append(rng.choices(kinds, [6, 1, 2, *[1] * (len(kinds) - 3)])[0])
    rng.shuffle(shapes)
    return shapes


class Gradients:
    """Gradients of every rank in every step: slices of one pool of normal numbers, with outliers and a run of zeros.

    Args:
        shapes: the parameters.
        world: number of ranks.
        seed: decides which slice a gradient is, and its magnitude.
    """

    _pools: dict[int, torch.Tensor] = {}

    def __init__(self, shapes: Sequence[Shape], world: int, seed: int) -> None:
        self.shapes, self.world = shapes, world
        self._seed = seed
        longest = max(shape.numel for shape in shapes)
        self._pool = self._pools.setdefault(0, _pool()) if longest < POOL // 2 else _pool(2 * longest)

    def of(self, rank: int, step: int, number: int, begin: int = 0, end: int | None = None) -> torch.Tensor:
        """Return elements of a rank's gradient of a parameter in the order of memory, 1-D fp32."""
        rng, numel = random.Random(f"{self._seed} {rank} {step} {number}"), self.shapes[number].numel
        first = rng.randrange(self._pool.numel() - numel)
        scale = 2.0 ** random.Random(f"{self._seed} {number}").randrange(-6, 3)
        nothing = rng.random() < 0.05 and rank > 0  # a rank whose data did not use a layer
        chosen = self._pool[first + begin : first + (numel if end is None else end)]
        return chosen * (0.0 if nothing else scale)

    def stacked(self, step: int, number: int, begin: int = 0, end: int | None = None) -> torch.Tensor:
        """Return the same elements on every rank, ``(world, count)`` fp64."""
        return torch.stack([self.of(rank, step, number, begin, end) for rank in range(self.world)]).double()


def _pool(numel: int = POOL) -> torch.Tensor:
    chance = torch.Generator().manual_seed(numel)
    made = torch.empty(numel).normal_(generator=chance)
    made[::997] *= 30.0
    made[numel // 2 : numel // 2 + 300] = 0.0  # whole blocks of zeros
    return made


def _prime(least: int) -> int:
    return next(n for n in range(least, 2 * least + 2) if all(n % k for k in range(2, math.isqrt(n) + 1)))


class _Given(torch.autograd.Function):
    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, total: torch.Tensor, *given: torch.Tensor) -> torch.Tensor:
        ctx.gradient = given[1]  # type: ignore[attr-defined]
        return total + 0.0

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, None]:
        return grad, ctx.gradient, None  # type: ignore[attr-defined]


class Model(torch.nn.Module):
    """Parameters that get exactly the given gradients, the last one first, as in a chain of layers."""

    def __init__(self, shapes: Sequence[Shape]) -> None:
        super().__init__()
        self.w = torch.nn.ParameterList([torch.nn.Parameter(one.of(torch.zeros(one.numel))) for one in shapes])

    def forward(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        total = torch.zeros((), requires_grad=True)
        for param, gradient in zip(self.w, gradients, strict=True):
            total = _Given.apply(total, param, gradient)
        return total


def wrapped(shapes: Sequence[Shape]) -> DistributedDataParallel:
    """Return the model with DDP's default buckets: at first one, later 1 MiB and then 25 MB each."""
    return DistributedDataParallel(Model(shapes))


def buckets(model: DistributedDataParallel) -> list[list[int]]:
    """Return the numbers of the parameters in each of DDP's present buckets, in the order in which they are reduced."""
    numbers = {id(p): number for number, p in enumerate(model.module.w)}
    return [[numbers[id(p)] for p in bucket.parameters()] for bucket in model.reducer._get_zeros_like_grad_buckets()]
