"""The model zoo: small versions of models that users wrap. ``model(x, use)`` gives a scalar loss, and ``use`` selects a
part.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

WIDTH, BATCH = 16, 6
ZOO: dict[str, Callable[[], nn.Module]] = {}


def zoo(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    ZOO[make.__name__.rstrip("_")] = make
    return make


class Run(nn.Module):
    """Layers in sequence. ``extra`` adds to the hidden vector."""

    def __init__(self, *layers: nn.Module, **extra: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        for name, part in extra.items():
            setattr(self, name, part)

    def hidden(self, x: torch.Tensor, use: int) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x

    def forward(self, x: torch.Tensor, use: int = 0) -> torch.Tensor:
        return self.hidden(x, use).float().square().mean()


def linear(rows: int = WIDTH, columns: int = WIDTH) -> nn.Linear:
    return nn.Linear(columns, rows)


@zoo
def mlp() -> nn.Module:
    return Run(linear(40), linear(24, 40), linear(33, 24))


@zoo
def shared() -> nn.Module:
    """One weight in two layers, like the tied embedding of a language model."""
    first, middle, last = linear(), linear(), linear()
    last.weight = first.weight
    return Run(first, middle, last)


@zoo
def unused() -> nn.Module:
    """One head that some ranks use in some steps, and one that no rank ever uses."""

    class Unused(Run):
        def hidden(self, x: torch.Tensor, use: int) -> torch.Tensor:
            x = super().hidden(x, use)
            return x + self.late(x) if use % 2 else x

    return Unused(linear(), linear(), late=linear(), never=linear())


@zoo
def frozen() -> nn.Module:
    model = Run(linear(), linear(24), linear(20, 24))
    model.layers[1].requires_grad_(False)
    return model


@zoo
def zero_d() -> nn.Module:
    class Scaled(Run):
        def hidden(self, x: torch.Tensor, use: int) -> torch.Tensor:
            return super().hidden(x, use) * self.scale

    return Scaled(linear(24), linear(24, 24), scale=nn.Parameter(torch.tensor(1.5)))


@zoo
def empty() -> nn.Module:
    class Empty(Run):
        def hidden(self, x: torch.Tensor, use: int) -> torch.Tensor:
            return super().hidden(x, use) + self.nothing.sum()

    return Empty(linear(24), linear(24, 24), nothing=nn.Parameter(torch.empty(0, 3)))


@zoo
def transposed() -> nn.Module:
    """Parameters stored by columns, one square and one not."""

    class Turned(Run):
        def hidden(self, x: torch.Tensor, use: int) -> torch.Tensor:
            return torch.tanh(super().hidden(x, use) @ self.square) @ self.oblong

    turned = {"square": torch.randn(16, 16).t() / 4, "oblong": torch.randn(24, 16).t() / 4}
    return Turned(linear(), **{name: nn.Parameter(t) for name, t in turned.items()})


@zoo
def strided() -> nn.Module:
    """A parameter that consists of every second column of a larger tensor."""

    class Strided(Run):
        def hidden(self, x: torch.Tensor, use: int) -> torch.Tensor:
            return super().hidden(x, use) @ self.every_second

    return Strided(linear(), every_second=nn.Parameter(torch.randn(16, 40)[:, ::2] / 4))


@zoo
def channels_last() -> nn.Module:
    class Images(Run):
        def hidden(self, x: torch.Tensor, use: int) -> torch.Tensor:
            images = x.view(-1, 1, 4, 4).expand(-1, 8, 4, 4).contiguous(memory_format=torch.channels_last)
            return super().hidden(self.conv(images).flatten(1)[:, :WIDTH], use)

    model = Images(linear(), conv=nn.Conv2d(8, 12, 3, padding=1))
    return model.to(memory_format=torch.channels_last)


@zoo
def complex_() -> nn.Module:
    class Complex(Run):
        def hidden(self, x: torch.Tensor, use: int) -> torch.Tensor:
            return super().hidden((x.to(torch.cfloat) @ self.turn).abs().to(x.dtype), use)

    return Complex(linear(24), linear(24, 24), turn=nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.cfloat) / 4))


@zoo
def sparse() -> nn.Module:
    class Sparse(Run):
        def hidden(self, x: torch.Tensor, use: int) -> torch.Tensor:
            return super().hidden(self.symbol(tokens(x)).mean(1), use)

    return Sparse(linear(24), linear(24, 24), symbol=nn.Embedding(19, WIDTH, sparse=True))


@zoo
def batch_norm() -> nn.Module:
    return Run(linear(24), nn.BatchNorm1d(24), linear(24, 24))


class SumOverRanks(torch.autograd.Function):
    """Sums over ranks as SyncBatchNorm does on a GPU, with a collective in forward and another within the backward."""

    @staticmethod
    def forward(ctx, value: torch.Tensor) -> torch.Tensor:  # type: ignore[no-untyped-def,override]
        value = value.clone()
        dist.all_reduce(value)
        return value

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[no-untyped-def,override]
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


class SyncNorm(nn.Module):
    """Batch normalisation over all ranks. Torch's own requires a GPU."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        world = dist.get_world_size()
        mean = SumOverRanks.apply(x.mean(0)) / world
        spread = SumOverRanks.apply((x - mean).square().mean(0)) / world
        return (x - mean) * (spread + 1e-3).rsqrt() * self.weight


@zoo
def sync_norm() -> nn.Module:
    return Run(linear(24), SyncNorm(24), linear(24, 24), SyncNorm(24), linear(16, 24))


@zoo
def rnn() -> nn.Module:
    class Recurrent(Run):
        def hidden(self, x: torch.Tensor, use: int) -> torch.Tensor:
            return super().hidden(self.cell(x.view(-1, 4, 4))[0][:, -1], use)

    return Recurrent(linear(), cell=nn.GRU(4, WIDTH, num_layers=2, batch_first=True))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(WIDTH), linear(3 * WIDTH)
        self.up, self.down = linear(4 * WIDTH + 1), linear(WIDTH, 4 * WIDTH + 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part[:, None] for part in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True)[:, 0]
        return x + self.down(F.gelu(self.up(x)))


class GPT(nn.Module):
    def __init__(self, how: str = "", layers: int = 2) -> None:
        super().__init__()
        self.how = how
        self.symbol = nn.Embedding(19, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.head = linear(19)

    def forward(self, x: torch.Tensor, use: int = 0) -> torch.Tensor:
        text = tokens(x)
        stream = self.symbol(text)
        for block in self.layers:
            stream = checkpoint(block, stream, use_reentrant=self.how == "reentrant") if self.how else block(stream)
        return F.cross_entropy(self.head(stream)[:, :-1].flatten(0, 1).float(), text[:, 1:].flatten())


@zoo
def gpt() -> nn.Module:
    return GPT()


@zoo
def reentrant() -> nn.Module:
    return GPT("reentrant")


@zoo
def non_reentrant() -> nn.Module:
    return GPT("non_reentrant")


@zoo
def moe() -> nn.Module:
    """Each rank and step uses one of three equal experts."""

    class Experts(Run):
        def hidden(self, x: torch.Tensor, use: int) -> torch.Tensor:
            x = torch.tanh(self.entry(x))
            return x + torch.tanh(self.layers[use % 3](x))

    return Experts(linear(), linear(), linear(), entry=linear())


@zoo
def double_use() -> nn.Module:
    """Uses the same layer twice in one forward."""

    class Twice(Run):
        def hidden(self, x: torch.Tensor, use: int) -> torch.Tensor:
            return super().hidden(super().hidden(x, use), use)

    return Twice(linear(), linear())


def tokens(x: torch.Tensor) -> torch.Tensor:
    """Return symbols of a text that depends on the batch."""
    return (x[:, :8].float() * 7).round().long() % 19


def batch(seed: int, step: int, rank: int, micro: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(((seed * 97 + step) * 13 + rank) * 5 + micro)
    return torch.randn(BATCH, WIDTH, generator=generator, dtype=torch.float32, device="cpu").to(dtype)


class Cast(nn.Module):
    """Runs a part of the model in another dtype, which gives mixed buckets."""

    def __init__(self, part: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.part, self.dtype = part.to(dtype), dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.part(x.to(self.dtype)).to(x.dtype)


def build(name: str, dtype: str) -> nn.Module:
    """Return a model of the zoo, the same on every rank."""
    torch.manual_seed(5)
    model = ZOO[name]()
    if dtype == "mixed":
        model.layers[-1] = Cast(model.layers[-1], torch.bfloat16)
    elif dtype != "autocast":
        for part in (*model.parameters(), *model.buffers()):
            if part.is_floating_point():  # in place, so that tied weights stay tied and strides stay
                part.data = part.data.to(getattr(torch, dtype))
    return model


def input_dtype(dtype: str) -> torch.dtype:
    return torch.float32 if dtype in {"mixed", "autocast"} else getattr(torch, dtype)
