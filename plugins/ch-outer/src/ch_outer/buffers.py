"""Averages floating-point buffers (BatchNorm's statistics) at the end of a round, so that all ranks hold one model."""

from collections.abc import Mapping
from typing import Any

import torch

from ch_outer.parameters import buffers_of
from commhooks import (
    AllReduce,
    Bucket,
    HookConfigError,
    Plain,
    Reducer,
    RemoteHookError,
    Stages,
    StateError,
    StepContext,
)

_LOW_BITS = 27  # of the 52 explicit mantissa bits of fp64


class ExactMean(Plain):
    """Average of equal numbers that returns this number, to the bit.

    In a buffer's own dtype, three times ``x / 3`` often differs from ``x``. Constant buffers (rotary tables, masks) would then
    drift round after round. Here each addend has few significant bits, so that sums over fewer than 2**13 ranks are exact.
    fp16 and bf16 travel as fp32, fp32 travels as fp64, and fp64 travels as two halves of its mantissa.
    """

    def run(self, bucket: Bucket, ctx: StepContext) -> Stages:
        parts = _exact_parts(bucket.storage)  # (1 or 2, n)
        # A power of two changes no bit of the mantissa. Without it a mask of torch.finfo(dtype).min would overflow.
        power = 2.0 ** (ctx.world_size - 1).bit_length()
        yield AllReduce(parts.div_(power), "sum")
        bucket.storage.copy_(parts.div_(ctx.world_size).mul_(power).sum(0))


def _exact_parts(numbers: torch.Tensor) -> torch.Tensor:
    """Return addends of ``numbers`` whose sums over ranks are exact: ``(1, n)``, or ``(2, n)`` for fp64.

    >>> _exact_parts(torch.tensor([0.1], dtype=torch.float64)).sum().item()
    0.1
    """
    if numbers.dtype != torch.float64:
        return numbers.to(torch.float64 if numbers.dtype == torch.float32 else torch.float32).unsqueeze(0)
    high = numbers.view(torch.int64).bitwise_and(-(1 << _LOW_BITS)).view(torch.float64)
    finite = numbers.isfinite()  # inf - inf would be NaN, and a NaN without its low bits may be inf
    high = torch.where(finite, high, numbers)
    return torch.stack([high, torch.where(finite, numbers - high, torch.zeros_like(numbers))])


class Buffers:
    """The floating-point buffers of a model, and their last average.

    Args:
        model: the model. Its own buffers may change between two averages.
        kind: ``"average"``, or ``"local"`` to leave buffers alone.
        **where: options of the reducer.

    Attributes:
        shared: the last average by name. Ranks share this model together with the starts.
        reducers: a list of the reducer, or an empty list if nothing is averaged.

    Raises:
        HookConfigError: the kind is unknown.
    """

    def __init__(self, model: torch.nn.Module, kind: str, **where: Any) -> None:
        if kind not in ("average", "local"):
            raise HookConfigError(f"buffers={kind!r}: legal are 'average' and 'local'")
        self._model, self._kind = model, kind
        self.shared = {name: b.clone() for name, b in buffers_of(model).items()} if kind == "average" else {}
        self.reducers = [Reducer(ExactMean(), self.shared, **where)] if self.shared else []

    def live(self) -> dict[str, torch.Tensor]:
        """Return the averaged buffers of the model. Modules may replace the tensor of a buffer, so look them up each time."""
        return buffers_of(self._model) if self.shared else {}

    def places(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return pairs of a buffer and its last average. Buffers with another shape (a cache that grows) are left out."""
        pairs = [(live, self.shared.get(name)) for name, live in self.live().items()]
        return [(live, shared) for live, shared in pairs if shared is not None and shared.shape == live.shape]

    def check_names(self) -> None:
        """Check that all floating-point buffers of the model are averaged.

        Raises:
            HookConfigError: a buffer was added or removed since construction.
        """
        if self._kind == "average" and (odd := sorted(buffers_of(self._model).keys() ^ self.shared.keys())):
            raise HookConfigError(
                f"the buffers {odd[:4]} were added or removed after the OuterOptimizer was made, so they are not averaged. "
                "Make another OuterOptimizer on all ranks, or give buffers='local'"
            )

    def average(self) -> dict[str, torch.Tensor]:
        """Return the average over the ranks, without writing it anywhere.

        Raises:
            HookConfigError: on all ranks, if a buffer of one rank has another shape than at construction.
        """
        if not self.reducers:
            return {}
        own, error = self.live(), None
        for name, shared in self.shared.items():
            if name not in own or own[name].shape != shared.shape:
                shape = tuple(own[name].shape) if name in own else None
                error = HookConfigError(
                    f"the buffer {name!r} has shape {shape} and had {tuple(shared.shape)} when the OuterOptimizer was made, so "
                    "it cannot be averaged. Keep its shape, or give buffers='local'"
                )
        try:
            return self.reducers[0].start(own, error=error).wait()
        except RemoteHookError as remote:
            raise HookConfigError(f"a peer could not average its buffers, so no rank has. {remote}") from remote

    def put(self, averaged: Mapping[str, torch.Tensor], *, live: bool = True) -> None:
        """Keep an average, if there is one.

        Args:
            averaged: the average by name, or an empty dict.
            live: True to write it to the model too.
        """
        for name, average in averaged.items():
            self.shared[name].copy_(average)
        for own, shared in self.places() if averaged and live else ():
            own.copy_(shared)

    def state_dict(self) -> dict[str, Any]:
        """Return the last average and the reducer's state. The model's own buffers are in the model's state."""
        return {
            "shared": {name: b.clone() for name, b in self.shared.items()},
            "reducers": [reducer.state_dict() for reducer in self.reducers],
        }

    def check(self, saved: Mapping[str, Any]) -> None:
        """Refuse the buffers of another model.

        Raises:
            StateError: names a buffer that differs.
        """
        here, there = ({name: tuple(b.shape) for name, b in one.items()} for one in (self.shared, saved["shared"]))
        for name, shape in here.items() ^ there.items():
            raise StateError(
                f"the saved outer state and this model differ in the buffer {name!r} of shape {shape}. Use the same model and "
                "buffers="
            )
