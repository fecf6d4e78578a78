"""How good the compression of some steps was, measured while they run: for `commhooks.telemetry`.

No step of any other rank is changed by it, and nobody waits: what is computed on a device is read when the next step
begins, after the verdict on the step has been read.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from commhooks.bucket import Bucket, ParamLayout
from commhooks.engine.counters import Counters
from commhooks.reduction import Reduction
from commhooks.state import HookState

FIELD = "residual"
Deliver = Callable[[int, Mapping[str, float]], None]
_SUMS = 3  # <p, p>, <r, r>, <p, r>


@dataclass(slots=True)
class _Wanted:
    """A bucket of a step that is sampled.

    Attributes:
        bucket: as it was given.
        before: a copy of its gradients; later plus the residuals of before the step.
        sent: where the reduction says what it sent, if it does.
    """

    bucket: Bucket
    before: Bucket
    sent: Bucket | None


@dataclass(slots=True)
class Sampling:
    """Figures of every so manyth step of one engine, on one rank.

    With p the gradient plus the residual of before, and r what of it was held back (the new residual, or what was not
    sent): the relative error is ‖r‖ / ‖p‖, the cosine that of p and p - r, over all parameters of which r is known.

    Args:
        every: steps from one sample to the next.
        deliver: given the number of the step and its figures, when the next step begins.
    """

    every: int
    deliver: Deliver
    _wanted: list[_Wanted] = field(default_factory=list)
    _before: dict[str, float] | None = None  # the counters when the sampled step began
    _sums: torch.Tensor | None = None
    _event: torch.cuda.Event | None = None
    _scale: float = 1.0
    _trips: int = 2
    _count: int = 0

    @property
    def active(self) -> bool:
        """Whether the running step is sampled."""
        return self._before is not None

    def begins(self, reduction: Reduction, state: HookState, counters: Counters) -> None:
        """A step begins; the one before has been decided, and its verdict read."""
        self.flush(counters)
        if self._before is None and self._count % self.every == 0:
            self._before = counters.as_dict() | {"trip_bytes": counters.traffic.trip_bytes}
            self._scale, self._trips = state.scale, reduction.trips
        self._count += 1
        self._wanted.clear()

    def takes(self, bucket: Bucket, reduction: Reduction, state: HookState) -> Bucket | None:
        """A bucket of the running step; where the reduction has to say what it sends, if it can."""
        if not self.active or not reduction.lossy or any(p.kind != "dense" for p in bucket.params):
            return None
        before = Bucket(bucket.layout, bucket.storage.clone(), bucket.index, bucket.is_last)
        sent = None
        if reduction.reports_sent:
            sent = Bucket(bucket.layout, torch.zeros_like(bucket.storage), bucket.index, bucket.is_last)
        elif FIELD in reduction.fields:
            for p in bucket.params:
                held = state.numbers(p.name, FIELD)
                if held is not None:
                    gradient = ordered(before, p, reduction, state.step)
                    gradient.add_(held.view_as(gradient))
        else:
            return None  # nobody can tell what it holds back
        self._wanted.append(_Wanted(bucket, before, sent))
        return sent

    def ended(self, reduction: Reduction, state: HookState) -> None:
        """Every bucket of the step has been reduced, and what was staged is there."""
        if not self._wanted:
            return
        parts = [row for one in self._wanted for row in _rows(one, reduction, state)]
        self._wanted.clear()
        if not parts:
            return
        sums = torch.stack([torch.stack(row) for row in parts]).sum(0)
        if sums.is_cuda:
            self._sums = torch.empty(_SUMS, dtype=sums.dtype, device="cpu", pin_memory=True)
            self._sums.copy_(sums, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._sums = sums

    def flush(self, counters: Counters, *, wait: bool = False) -> None:
        """Deliver the sample that is complete.

        Args:
            counters: of the engine.
            wait: for the device, if it has not come so far; without, the sample is delivered a step later.
        """
        before = self._before
        if before is None or counters.steps <= before["steps"]:
            return
        if self._event is not None:
            if wait:
                self._event.synchronize()
            elif not self._event.query():
                return
        after = counters.as_dict() | {"trip_bytes": counters.traffic.trip_bytes}
        steps = after["steps"] - before["steps"]
        spent = {key: (after[key] - before[key]) / steps for key in after if not key.endswith("steps")}
        figures = {key: value for key, value in spent.items() if key.endswith(("_bytes", "_seconds"))}
        trips = figures.pop("trip_bytes")
        if trips > 0 and counters.gradient_bytes:
            figures["ratio"] = self._trips * counters.gradient_bytes / trips
        if self._sums is not None:
            figures |= _figures(self._sums.tolist(), self._scale)
        number, self._before, self._sums, self._event = int(before["steps"]), None, None, None
        self.deliver(number, figures)

    def abandon(self) -> None:
        """The step never finishes: there is nothing to tell of it."""
        self._wanted.clear()
        self._before = self._sums = self._event = None


def ordered(bucket: Bucket, p: ParamLayout, reduction: Reduction, step: int) -> torch.Tensor:
    """A parameter of a bucket in the order in which the reduction keeps its residual."""
    return bucket.matrix(p) if FIELD in reduction.memory_order(p, step) else bucket.view(p)


def _rows(one: _Wanted, reduction: Reduction, state: HookState) -> list[tuple[torch.Tensor, ...]]:
    """<p, p>, <r, r> and <p, r> of every parameter of which r is known."""
    found: list[tuple[torch.Tensor, ...]] = []
    held = state.held() if one.sent is None else frozenset()
    for p in one.bucket.params:
        if not p.numel:
            continue
        if one.sent is not None:
            wanted = one.before.matrix(p)
            back = wanted - one.sent.matrix(p)
        elif (p.name, FIELD) in held:
            wanted = ordered(one.before, p, reduction, state.step)
            back = state.newest(p.name, FIELD).view_as(wanted)
        else:
            continue
        a, b = wanted.reshape(-1).float(), back.reshape(-1).float()
        found.append((torch.dot(a, a), torch.dot(b, b), torch.dot(a, b)))
    return found


def _figures(sums: list[float], scale: float) -> dict[str, float]:
    pp, rr, pr = sums
    passed = pp - 2 * pr + rr  # <p - r, p - r>
    figures = {"residual_norm": math.sqrt(max(rr, 0.0)) / scale}
    if pp > 0:
        figures["relative_error"] = math.sqrt(max(rr, 0.0) / pp)
    if pp > 0 and passed > 0:
        figures["cosine"] = max(-1.0, min(1.0, (pp - pr) / math.sqrt(pp * passed)))
    return figures
