"""How good the compression of some steps was, measured while they run: for `commhooks.telemetry`.

No step of any other rank is changed by it, and nobody waits: what is computed on a device is read when the next step
begins, after the outcome on the step has been read.
"""

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from commhooks.bucket import Bucket, ParamLayout
from commhooks.engine.counters import Counters
from commhooks.reduction import Reduction
from commhooks.state import HookState

log = logging.getLogger("commhooks")

FIELD = "residual"
Deliver = Callable[[int, Mapping[str, float]], None]
_SUMS = 3  # <p, p>, <r, r>, <p, r>


@dataclass(slots=True, eq=False)
class Recording:
    """One recorder of an engine: its interval and its writer.

    Args:
        every: steps from one sample to the next.
        deliver: called with the number of the step and its figures when the next step begins.
    """

    every: int
    deliver: Deliver
    _steps: int = 0  # since the recorder was added

    def due(self) -> bool:
        """True if this recorder wants the step that begins. Call it once a step."""
        self._steps += 1
        return (self._steps - 1) % self.every == 0


@dataclass(slots=True)
class _SampledBucket:
    """A bucket of a sampled step.

    Attributes:
        bucket: the bucket that is reduced.
        before: copy of its gradients; the sampler adds the residuals that were there when the step began.
        sent: bucket that the reduction fills with its own contribution, if it reports one.
    """

    bucket: Bucket
    before: Bucket
    sent: Bucket | None


@dataclass(slots=True)
class _Sample:
    """Figures of one step, on their way to the recorders that wanted them."""

    recordings: list[Recording]
    counters: dict[str, float]  # when the step began
    scale: float
    trips: int
    buckets: list[_SampledBucket] = field(default_factory=list)
    sums: torch.Tensor | None = None  # (_SUMS,), on the CPU
    event: torch.cuda.Event | None = None


class Sampler:
    """Samples steps of one engine for all its recorders.

    With p the gradient plus the old residual, and r the part of p that was not sent, the relative error is ‖r‖ / ‖p‖ and
    the cosine is the one between p and p - r. Both cover all parameters whose r is known. Recorders that want the same step
    share one sample.

    An exception never leaves :meth:`begin`, :meth:`take` or :meth:`end`: peers may wait in a collective meanwhile. It is
    logged, and sampling stops.

    Args:
        rank: this rank, for log messages.

    Attributes:
        recordings: the recorders.
    """

    __slots__ = ("_rank", "_sample", "recordings")

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.recordings: list[Recording] = []
        self._sample: _Sample | None = None

    def add(self, recording: Recording) -> None:
        """Sample for this recorder, from the next step on."""
        self.recordings.append(recording)

    def remove(self, recording: Recording, counters: Counters) -> None:
        """Deliver the last complete sample, for which the host waits, and drop this recorder."""
        if recording in self.recordings:
            self.flush(counters, wait=True)
        self._drop(recording)

    def begin(self, reduction: Reduction, state: HookState, counters: Counters) -> None:
        """A step begins, and the outcome of the previous step is known."""
        try:
            self.flush(counters)
            due = [recording for recording in self.recordings if recording.due()]
            if due and self._sample is None:
                self._sample = _Sample(due, _with_trips(counters), state.scale, reduction.trips)
        except Exception:
            self._stop()

    def take(self, bucket: Bucket, reduction: Reduction, state: HookState) -> Bucket | None:
        """Copy a bucket of a sampled step. Return the bucket in which the reduction reports its contribution, if it can."""
        if self._sample is None or not reduction.lossy or any(p.kind != "dense" for p in bucket.params):
            return None
        try:
            return self._take(self._sample, bucket, reduction, state)
        except Exception:
            self._stop()
            return None

    def _take(self, sample: _Sample, bucket: Bucket, reduction: Reduction, state: HookState) -> Bucket | None:
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
            return None  # neither a residual nor a report says what was not sent
        sample.buckets.append(_SampledBucket(bucket, before, sent))
        return sent

    def end(self, reduction: Reduction, state: HookState) -> None:
        """Compute the figures. Every bucket holds its average, and the new residuals are staged."""
        sample = self._sample
        if sample is None or not sample.buckets:
            return
        try:
            buckets, sample.buckets = sample.buckets, []
            rows = [row for one in buckets for row in _rows(one, reduction, state)]
            if not rows:
                return
            sums = torch.stack([torch.stack(row) for row in rows]).sum(0)
            if sums.is_cuda:
                sample.sums = torch.empty(_SUMS, dtype=sums.dtype, device="cpu", pin_memory=True)
                sample.sums.copy_(sums, non_blocking=True)
                sample.event = torch.cuda.Event()
                sample.event.record()
            else:
                sample.sums = sums
        except Exception:
            self._stop()

    def flush(self, counters: Counters, *, wait: bool = False) -> None:
        """Deliver the sample of a finished step.

        Args:
            counters: of the engine.
            wait: wait for the device; otherwise an unfinished sample is delivered a step later.
        """
        sample = self._sample
        if sample is None or counters.steps <= sample.counters["steps"]:
            return
        if sample.event is not None:
            if wait:
                sample.event.synchronize()
            elif not sample.event.query():
                return
        self._sample = None
        before, after = sample.counters, _with_trips(counters)
        steps = after["steps"] - before["steps"]
        spent = {key: (after[key] - before[key]) / steps for key in after if not key.endswith("steps")}
        figures = {key: value for key, value in spent.items() if key.endswith(("_bytes", "_seconds"))}
        trips = figures.pop("trip_bytes")
        if trips > 0 and counters.gradient_bytes:
            figures["ratio"] = sample.trips * counters.gradient_bytes / trips
        if sample.sums is not None:
            figures |= _figures(sample.sums.tolist(), sample.scale)
        for recording in sample.recordings:
            try:
                recording.deliver(int(before["steps"]), dict(figures))
            except Exception:  # a full disk or a lost server must not end the training
                log.exception("[rank %d] a telemetry writer raised, so its recorder is off now", self._rank)
                self._drop(recording)

    def abandon(self) -> None:
        """Drop the sample of a step that never finishes."""
        self._sample = None

    def _drop(self, recording: Recording) -> None:
        if recording in self.recordings:
            self.recordings.remove(recording)
        if self._sample is not None and recording in self._sample.recordings:
            self._sample.recordings.remove(recording)

    def _stop(self) -> None:
        log.exception(
            "[rank %d] telemetry could not sample a step, so all recorders of this hook are off now", self._rank
        )
        self.recordings.clear()
        self._sample = None


def _with_trips(counters: Counters) -> dict[str, float]:
    return counters.as_dict() | {"trip_bytes": counters.traffic.trip_bytes}


def ordered(bucket: Bucket, p: ParamLayout, reduction: Reduction, step: int) -> torch.Tensor:
    """A parameter of a bucket in the order in which the reduction keeps its residual."""
    return bucket.matrix(p) if FIELD in reduction.memory_order(p, step) else bucket.view(p)


def _rows(one: _SampledBucket, reduction: Reduction, state: HookState) -> list[tuple[torch.Tensor, ...]]:
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
