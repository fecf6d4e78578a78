"""Models whose gradients are given numbers, and limits under which small messages go every way that long ones go."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch
from torch import nn

import ch_quant
import ch_quant.sizes
from ch_core import TUNED
from ch_core.sizes import SIZES
from ch_testing.gradients import gradients, parameters

Like = Mapping[str, torch.Tensor]

ORDINARY = {  # 7.8 M numbers. DDP's last bucket has 20 MB
    "first.weight": (2300, 1000),
    "second.weight": (1500, 1001),
    "second.bias": (1501,),
    "layer3.weight": (1400, 1000),
    "head.weight": (2601, 999),
}


def like(size: str) -> Like:
    """Return tensors like the parameters of a ``small`` or an ``ordinary`` model."""
    if size == "small":  # the policy of tests/sizes/hooks.py matches a 3
        return {name.replace("odd", "odd3"): tensor for name, tensor in parameters().items()}
    return {name: torch.empty(shape, dtype=torch.float32, device="cpu") for name, shape in ORDINARY.items()}


class Given(nn.Module):
    """A model whose gradients are the numbers that its forward gets. Parameters without numbers are not used."""

    def __init__(self, shapes: Like) -> None:
        super().__init__()
        self.names = list(shapes)
        for name, tensor in shapes.items():
            *path, last = name.split(".")
            place: nn.Module = self
            for part in path:
                if not hasattr(place, part):
                    place.add_module(part, nn.Module())
                place = getattr(place, part)
            place.register_parameter(last, nn.Parameter(torch.empty_like(tensor).fill_(1.0)))

    def forward(self, given: Like) -> torch.Tensor:
        params = dict(self.named_parameters())
        return torch.stack([(params[name] * given[name]).sum() for name in self.names if name in given]).sum()


def given(shapes: Like, rank: int, step: int) -> dict[str, torch.Tensor]:
    """Return a rank's gradients of a step."""
    if sum(t.numel() for t in shapes.values()) < 100_000:
        return gradients(dict(shapes), rank, step)
    made = {}
    for number, (name, tensor) in enumerate(shapes.items()):  # cheap numbers, because there are millions
        ramp = torch.arange(tensor.numel(), dtype=torch.float32, device="cpu")
        made[name] = torch.sin(ramp * (1.0 + 0.01 * rank + 0.1 * step) + number).view(tensor.shape)
    return made


# Sizes at which messages are cut, halved, merged or exchanged directly, as kilobytes instead of megabytes.
SMALL: tuple[tuple[object, dict[str, float]], ...] = (
    (TUNED, {"coalesced_bytes": 600, "direct_bytes": 1 << 11, "direct_extra_bytes": 1 << 10, "halved_from": 1 << 12}),
    (SIZES, {"broadcast_from": 1 << 9, "pieces_from": 1 << 11, "pieces_below": 1 << 16}),
    (SIZES, {"piece_bytes": 1 << 10, "part_bytes": 1 << 8}),
    (ch_quant.sizes.SIZES, {"chunk_elements": 1 << 10}),
)


@contextmanager
def small_limits() -> Iterator[None]:
    """Send small messages in every way in which long ones are sent."""
    with mock.patch.object(ch_quant.Quantized, "piece_bytes", 1 << 13), ExitStack() as undo:
        for limits, values in SMALL:
            for name, value in values.items():
                undo.callback(object.__setattr__, limits, name, getattr(limits, name))
                object.__setattr__(limits, name, value)  # frozen, and all engines share this object
        yield
