"""Models of given shapes without arithmetic: a step costs only the work of its hook."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

FIRST_BUCKET, BUCKET = 1 << 20, 25 << 20  # bytes after which DDP's buckets are full
Sizes = tuple[int, int, int, int]
"""Layers, width, vocabulary and context of a GPT."""


def gpt_shapes(layers: int, width: int, vocab: int, context: int) -> dict[str, tuple[int, ...]]:
    """Return the parameter shapes of a GPT-2 by name."""
    shapes: dict[str, tuple[int, ...]] = {"wte": (vocab, width), "wpe": (context, width)}
    for i in range(layers):
        shapes |= {
            f"{i}.ln1.w": (width,), f"{i}.ln1.b": (width,),
            f"{i}.attn.w": (3 * width, width), f"{i}.attn.b": (3 * width,),
            f"{i}.proj.w": (width, width), f"{i}.proj.b": (width,),
            f"{i}.ln2.w": (width,), f"{i}.ln2.b": (width,),
            f"{i}.fc.w": (4 * width, width), f"{i}.fc.b": (4 * width,),
            f"{i}.out.w": (width, 4 * width), f"{i}.out.b": (width,),
        }  # fmt: skip
    return shapes | {"lnf.w": (width,), "lnf.b": (width,)}


def filled(
    sizes: Mapping[str, tuple[int, ...]], cap: float = BUCKET, first: float = FIRST_BUCKET, itemsize: int = 4
) -> list[dict[str, tuple[int, ...]]]:
    """Return parameters in buckets as DDP fills them, the last parameters first.

    Args:
        sizes: shape of each parameter, in the order of the model.
        cap: bytes after which a bucket is full.
        first: bytes after which the first bucket is full, if that is less.
        itemsize: bytes of a number.

    >>> filled({"a": (512, 512), "b": (256, 512), "c": (512, 512)}, 1.5 * 2**20)
    [{'c': (512, 512)}, {'b': (256, 512), 'a': (512, 512)}]
    """
    made: list[dict[str, tuple[int, ...]]] = [{}]
    held = 0
    for name, shape in reversed(list(sizes.items())):
        made[-1][name] = shape
        held += math.prod(shape) * itemsize
        if held >= (min(first, cap) if len(made) == 1 else cap):
            made.append({})
            held = 0
    return [bucket for bucket in made if bucket]


def random_gradients(
    shapes: Mapping[str, Sequence[int]], dtype: torch.dtype, device: torch.device
) -> list[torch.Tensor]:
    """Return a random gradient of each shape, the same at every call."""
    generator = torch.Generator(device).manual_seed(0)
    return [
        torch.randn(tuple(s), generator=generator, dtype=torch.float32, device=device).mul_(1e-3).to(dtype)
        for s in shapes.values()
    ]


class ShapesOnly(nn.Module):
    """Parameters whose backward only hands over given gradients.

    Args:
        gradients: one for each parameter, handed over by every backward.
    """

    def __init__(self, gradients: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.params = nn.ParameterList(torch.zeros_like(g) for g in gradients)
        self.gradients = gradients

    def forward(self) -> torch.Tensor:
        found: torch.Tensor = _Given.apply(self.gradients, *self.params)  # type: ignore[no-untyped-call]
        return found


class _Given(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gradients: Sequence[torch.Tensor], *params: torch.Tensor) -> torch.Tensor:
        ctx.gradients = gradients
        return params[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        return (None, *ctx.gradients)
