"""Weights of ranks in the average of a step: ``sum(n_r g_r) / sum(n_r)`` instead of the mean of the g_r.

Rank r multiplies its gradient g_r by ``f_r = n_r / reference`` before its reduction encodes it. The reduction averages the
products, and keeps residuals in their unit. The ranks exchange all f_r in the status message of the step, without a message of
their own. At the end of the step each bucket is multiplied by ``W / sum(f_r)``. Code that uses an average earlier (FSDP2, an
optimizer inside the backward) needs the weights earlier. They then travel next to the first bucket.

The reference is a power of two that all ranks know. The ranks gather their weights before the first weighted step of a group or
after a load, and keep the reference of their states if it is equal on all of them. From then on it stays until the mean weight of
a step is more than four times as large or as small. Products with
a power of two are exact, so if all weights equal the reference, a step has the bits of a step without weights. A step without
weights counts as a step in which all weights equal the reference.
"""

import math
from collections.abc import Iterable
from typing import Literal

import torch

from ch_core.bucket import Bucket
from ch_core.device import HostCopy, is_asynchronous
from ch_core.engine.messages import Batch, Messenger
from ch_core.errors import HookConfigError
from ch_core.requests import AllReduce

Of = Literal["mean", "sum"]
"""What a rank's gradient is: of the mean of its loss over its tokens, or of the sum."""

# Sent in the place of a weight. All ranks then raise one error. Both fit exactly into fp32.
_MISSING, _MIXED = -(2.0**126), -(2.0**125)
_LEAST, _MOST = 2.0**-64, 2.0**64
_DRIFT = 4.0  # a reference that is further away from the mean weight would cost fp16 its range


class Weighing:
    """Weight of the next step of one rank, from all calls of :meth:`add` since the last step."""

    def __init__(self) -> None:
        self._weight: float | torch.Tensor | None = None
        self._of: Of = "mean"

    def add(self, weight: float | torch.Tensor, of: Of = "mean") -> None:
        """Add to the weight of the next step. See :meth:`.CommHook.weigh`."""
        if isinstance(weight, torch.Tensor):
            if weight.numel() != 1 or weight.is_complex():
                raise HookConfigError(
                    f"weigh() takes one number, such as the number of tokens, as a float or a tensor; got {weight.dtype} of "
                    f"shape {tuple(weight.shape)}"
                )
            # A copy, because the script may write to its tensor before the step begins.
            weight = weight.detach().to(torch.float32, copy=True).reshape(())
        else:
            weight = float(weight)
        if of not in ("mean", "sum"):
            raise HookConfigError(f"weigh(of={of!r}): expected 'mean' or 'sum'")
        if self._weight is None:
            self._weight, self._of = weight, of
        elif self._of == of:
            self._weight = _legal_or_nan(self._weight) + _legal_or_nan(weight)
        else:
            self._weight = _MIXED  # raised at the end of the step, on all ranks

    @property
    def weight(self) -> float | torch.Tensor | None:
        """The weight of the next step; ``None`` without a call of :meth:`add`."""
        return self._weight

    def take(self) -> tuple[float | torch.Tensor, Of]:
        """Return weight and kind of the step that begins, and start from nothing."""
        weight = _MISSING if self._weight is None else self._weight
        self._weight = None
        return weight, self._of

    def clear(self) -> None:
        """Forget the weight of a step that does not begin."""
        self._weight = None


class StepWeights:
    """Weights of one step: this rank's, and those of all ranks after :meth:`received`.

    Args:
        rank, world: rank in the group, and number of its ranks.
        weight: this rank's; a 0-d tensor if it is on a device that the host must not wait for.
        of: kind of its gradient.
        device: device of the step's messages.
        reference: weight that all ranks know. A member that heals in this step does not know it yet, and needs only f_r.

    Attributes:
        reference: as given.
        vector: (W,) fp32. Element r is f_r of rank r, 0 from every other rank until :meth:`received`.
        early: True if the weights travel next to the first bucket, and averages are divided when they are complete.
    """

    __slots__ = ("_batch", "_copy", "_f", "_of", "_ranks", "_values", "early", "reference", "vector")

    def __init__(
        self, rank: int, world: int, weight: float | torch.Tensor, of: Of, device: torch.device, reference: float
    ) -> None:
        self._of, self.reference, self.early = of, reference, False
        said = not isinstance(weight, torch.Tensor) and weight in (_MISSING, _MIXED)
        f = weight if said else weight / reference
        # Rounded, because the peers divide by the number in the vector.
        self._f = f if isinstance(f, torch.Tensor) else _fp32(f)
        self.vector = torch.zeros(world, dtype=torch.float32, device=device)
        # By fill_, because an assignment by index copies from pageable memory, for which the host would wait for a GPU.
        self.vector[rank].copy_(self._f) if isinstance(self._f, torch.Tensor) else self.vector[rank].fill_(self._f)
        self._batch: Batch | None = None
        self._copy: HostCopy | None = None
        self._values: list[float] | None = None
        self._ranks = world  # of the average

    # -- before the reduction

    def scale(self, bucket: Bucket) -> None:
        """Multiply a bucket by this rank's weight over the reference. A weight of 0 makes zeros, also of NaN."""
        numbers, f = _numbers(bucket), self._f
        factor = f if self._of == "mean" else 1.0 / self.reference
        if isinstance(f, torch.Tensor):
            _multiply(numbers, factor)
            numbers.masked_fill_(f == 0, 0)
        else:
            _multiply(numbers, factor if f else 0.0)

    # -- the exchange

    def post(self, messenger: Messenger) -> None:
        """Send the weights now, because averages of this step are used before it ends."""
        self.early = True
        self._batch = messenger.post(AllReduce(self.vector, "sum"))

    def part(self) -> torch.Tensor | None:
        """Return this rank's part of the status, (W,) fp32; ``None`` if the weights have travelled before."""
        return None if self.early else self.vector

    def received(self, vector: torch.Tensor, *, alone: bool = False) -> None:
        """Take the weights of all ranks.

        Args:
            vector: as :attr:`vector`.
            alone: True if this rank averaged alone.
        """
        self.vector, self._values = vector, None
        self._ranks = 1 if alone else vector.numel()
        self._copy = HostCopy(vector)

    def receive_early(self, timeout: float | None) -> None:
        """Receive the weights after :meth:`post`, once."""
        if self._batch is not None:
            self._batch.wait(timeout)
            self._batch = None
            self.received(self.vector)

    def values(self) -> list[float]:
        """Return all f_r. On a GPU the host waits for them."""
        if self._values is None:
            self._values = (self._copy or HostCopy(self.vector)).values()
        return self._values

    # -- after it

    def divide(self, buckets: Iterable[Bucket]) -> None:
        """Divide averages by the mean f_r. All weights 0 make zeros. On a GPU the host does not wait."""
        factor: float | torch.Tensor
        if is_asynchronous(self.vector.device):
            total = self.vector.sum()
            legal = ((self.vector >= 0) & self.vector.isfinite()).all()
            factor = torch.where(total == 0, 0.0, self._ranks / total)
            factor = torch.where(legal, factor, math.nan)  # the host learns of it in the next step
        elif self.error("") is not None:
            return
        else:
            factor = self._ranks / self.total if self.total else 0.0
        for bucket in buckets:
            _multiply(_numbers(bucket) if bucket.output is None else bucket.output, factor)

    def divide_early(self, bucket: Bucket, messenger: Messenger, name: str) -> None:
        """Divide one average before it is used, after :meth:`post`.

        Raises:
            HookConfigError: a rank has no legal weight. All ranks raise it.
        """
        self.receive_early(messenger.timeout)
        error = None if is_asynchronous(self.vector.device) else self.error(name)
        if error is not None:
            raise error
        self.divide([bucket])

    @property
    def total(self) -> float:
        """Sum of all f_r."""
        return math.fsum(self.values())

    @property
    def divisor(self) -> float:
        """Mean f_r, by which an average is divided; 1 if it is not."""
        mean = self.total / self._ranks
        return mean if 0 < mean < math.inf else 1.0

    def error(self, name: str) -> HookConfigError | None:
        """Return the error that all ranks raise if a rank has no legal weight."""
        texts = [_fault(f, self.reference) for f in self.values()]
        faults = [f"rank {rank} {text}" for rank, text in enumerate(texts) if text]
        if not faults:
            return None
        return HookConfigError(
            f"{name}: {'; '.join(faults)}, so the weighted average of this step is not known. Before each backward of a model "
            "that is attached with weighted=True, every rank calls handle.weigh(n) with its number of tokens or samples, 0 or "
            "more and finite. All calls for one average have the same of="
        )


def reference_for(weights: Iterable[float]) -> float | None:
    """Return the power of two next to the mean of the legal weights above 0; ``None`` if there are none.

    >>> reference_for([1000.0, 0.0, 1100.0]), reference_for([0.0])
    (1024.0, None)
    """
    found = [one for one in weights if 0 < one < math.inf]
    if not found:
        return None
    mean = math.fsum(found) / len(found)
    return max(_LEAST, min(_MOST, 2.0 ** round(math.log2(mean))))


def next_reference(reference: float, shares: Iterable[float]) -> float:
    """Return the reference after a step in which ranks weighed these multiples of it.

    >>> next_reference(1024.0, [3.0, 2.0]), next_reference(1024.0, [9.0, 8.0])
    (1024.0, 8192.0)
    """
    ratio = reference_for(shares)
    if ratio is None or 1 / _DRIFT <= ratio <= _DRIFT:
        return reference
    return max(_LEAST, min(_MOST, reference * ratio))


def as_message(*weights: float | torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return weights, of which tensors are on the device, as (n,) fp32 without a wait of the host."""
    return torch.stack(
        [
            one if isinstance(one, torch.Tensor) else torch.full((), _fp32(one), dtype=torch.float32, device=device)
            for one in weights
        ]
    )


def _fp32(number: float) -> float:
    """Round to fp32. A number beyond its range is infinite, where torch would raise on this rank alone."""
    return torch.tensor(number, dtype=torch.float64, device="cpu").float().item()


def _legal_or_nan(weight: float | torch.Tensor) -> float | torch.Tensor:
    """Return NaN for a negative weight, which the weight of a later backward would hide in the sum."""
    if isinstance(weight, torch.Tensor):
        return torch.where(weight >= 0, weight, math.nan)
    return weight if weight >= 0 else math.nan


def _fault(f: float, reference: float) -> str:
    if f == _MISSING:
        return "has not called weigh()"
    if f == _MIXED:
        return "has called weigh() with of='mean' and with of='sum'"
    return "" if 0 <= f < math.inf else f"weighs {f * reference:g}"


def _numbers(bucket: Bucket) -> torch.Tensor:
    return bucket.storage._values() if bucket.storage.is_sparse else bucket.storage


def _multiply(numbers: torch.Tensor, factor: float | torch.Tensor) -> None:
    """Multiply in place, and round once. A step whose factors are 1 keeps its bits."""
    if isinstance(factor, float):
        if factor == 0.0:
            numbers.zero_()  # residuals may be there, and 0 * Inf is NaN
        elif factor != 1.0:
            numbers.mul_(factor)
    elif numbers.dtype.itemsize < 4:  # torch would round the factor to 16 bits first
        numbers.copy_(numbers.float().mul_(factor))
    else:
        numbers.mul_(factor)
