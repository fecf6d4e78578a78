"""Averages floating-point buffers (BatchNorm's statistics) at the end of a round, so that all ranks hold one model."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ch_outer.joining import joined
from ch_outer.parts import buffers_of
from commhooks import AllReduce, Bucket, HookConfigError, Plain, Reducer, RemoteHookError, StateError, StepContext

_LOW_BITS = 27  # of the 52 explicit mantissa bits of fp64


class ExactMean(Plain):
    """Average whose result for equal numbers is that number, to the bit.

    A mean in the buffer's own dtype is not exact: three times ``x / 3`` is not ``x`` in most cases, and constant buffers
    (rotary tables, masks) would drift round after round. Every addend here has so few significant bits that sums over
    fewer than 2**13 ranks are exact: fp16 and bf16 travel as fp32, fp32 as fp64, fp64 as two halves of its mantissa.
    """

    def run(self, bucket: Bucket, ctx: StepContext) -> Iterator[AllReduce]:
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
    """The buffers of a model, and what the ranks share of them: the last average.

    Args:
        model: whose; each rank's own run on between two averages.
        kind: ``"average"``, or ``"local"``: then there are none here.
        **where: of the reducer.

    Attributes:
        shared: by name, as of the last average: with the starts, the one model that all ranks share.
        reducers: the one that averages them, if there are any.

    Raises:
        HookConfigError: another kind.
    """

    def __init__(self, model: torch.nn.Module, kind: str, **where: Any) -> None:
        if kind not in ("average", "local"):
            raise HookConfigError(f"buffers={kind!r}: legal are 'average' and 'local'")
        self._model, self._kind = model, kind
        self.shared = {name: b.clone() for name, b in buffers_of(model).items()} if kind == "average" else {}
        self.reducers = [Reducer(ExactMean(), self.shared, **where)] if self.shared else []

    def live(self) -> dict[str, torch.Tensor]:
        """Those in the model, looked up anew: a module may put another tensor in the place of one."""
        return buffers_of(self._model) if self.shared else {}

    def places(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Each with what is shared of it, but for those that have changed their shape (a cache that grows)."""
        pairs = [(live, self.shared.get(name)) for name, live in self.live().items()]
        return [(live, shared) for live, shared in pairs if shared is not None and shared.shape == live.shape]

    def check_names(self) -> None:
        """Check that all floating-point buffers of the model are averaged.

        Raises:
            HookConfigError: a buffer was added or removed since.
        """
        if self._kind == "average" and (odd := sorted(buffers_of(self._model).keys() ^ self.shared.keys())):
            raise HookConfigError(
                f"the buffers {odd[:4]} were added or removed after the OuterOptimizer was made, so they are not averaged. "
                "Make another OuterOptimizer on all ranks, or give buffers='local'"
            )

    def average(self) -> dict[str, torch.Tensor]:
        """Average over the ranks. Nothing is written yet.

        Raises:
            HookConfigError: on all ranks, if a rank's buffer has another shape than at construction.
        """
        if not self.reducers:
            return {}
        live, error = self.live(), None
        for name, shared in self.shared.items():
            if name not in live or live[name].shape != shared.shape:
                shape = tuple(live[name].shape) if name in live else None
                error = HookConfigError(
                    f"the buffer {name!r} has shape {shape} and had {tuple(shared.shape)} when the OuterOptimizer was made, so "
                    "it cannot be averaged: keep its shape, or give buffers='local'"
                )
        try:
            return self.reducers[0].start(live, error=error).wait()
        except RemoteHookError as remote:
            raise HookConfigError(f"a peer could not average its buffers, so no rank has. {remote}") from remote

    def put(self, averaged: Mapping[str, torch.Tensor], *, live: bool = True) -> None:
        """What all ranks share from now on, if it is anything; this rank's own, too, if they are ``live``."""
        for name, average in averaged.items():
            self.shared[name].copy_(average)
        for own, shared in self.places() if averaged and live else ():
            own.copy_(shared)

    def state_dict(self) -> dict[str, Any]:
        """What is shared. The model's own are in its own state."""
        return {
            "shared": {name: b.clone() for name, b in self.shared.items()},
            "reducers": [reducer.state_dict() for reducer in self.reducers],
        }

    def check(self, saved: Mapping[str, Any]) -> None:
        """Refuse the buffers of another model.

        Raises:
            StateError: naming one of them.
        """
        here, there = ({name: tuple(b.shape) for name, b in one.items()} for one in (self.shared, saved["shared"]))
        for name, shape in here.items() ^ there.items():
            raise StateError(
                f"the saved outer state and this model differ in the buffer {name!r} of shape {shape}: give the same model and "
                "buffers="
            )

    def join(self, given: Mapping[str, Any], *, behind: bool) -> None:
        """Go on from another member's :meth:`state_dict`; who is ``behind`` has its buffers, too."""
        self.check(given)
        self.put(given["shared"], live=behind)
        for reducer, theirs in zip(self.reducers, given["reducers"], strict=True):
            reducer.load_state_dict(joined(reducer.state_dict(), theirs, behind=behind))
