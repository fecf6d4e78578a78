"""Figures of an engine: counters, and sampled errors for telemetry."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from ch_core.bucket import Bucket, ParamLayout
from ch_core.device import HostCopy
from ch_core.entries import RESIDUAL
from ch_core.logs import log
from ch_core.reduction import Reduction
from ch_core.state import HookState

# -- counters


@dataclass(slots=True)
class Traffic:
    """Cumulative traffic of one rank.

    Attributes:
        payload_bytes: bytes of the tensors that reductions give to collectives, from their plans; exact.
        wire_bytes: bytes that this rank sends, as :class:`~ch_core.engine.messages.Batch` models them.
        between_bytes: the part of them that leaves the node; 0 if the nodes are not known.
        trip_bytes: payload times its passes over the network, two for an all-reduce.
        rounds: batches that communicated.
    """

    payload_bytes: float = 0.0
    wire_bytes: float = 0.0
    between_bytes: float = 0.0
    trip_bytes: float = 0.0
    rounds: int = 0


class StepTrace(Protocol):
    """Receives the times of an engine's work while a trace records. All times are seconds of ``time.perf_counter()``."""

    def begin(self, step: int) -> None:
        """Begin a step."""

    def computed(self, number: int, bucket: Bucket, stage: int, begun: float, ended: float, *, decode: bool) -> None:
        """Note that the reduction of run ``number`` computed up to its next requests, or after its last ones."""

    def waited(self, number: int, bucket: Bucket, stage: int, begun: float, ended: float) -> None:
        """Note that run ``number`` waited for the messages of a stage."""

    def sending(self, runs: Sequence[tuple[int, Bucket, int]]) -> None:
        """Note that the next messages belong to these runs, each a number, a bucket and a stage; none after an empty list."""

    def started(self, begun: float, ended: float) -> None:
        """Note that the requests of the runs of :meth:`sending` were merged, cast and started."""

    def finishing(self, at: float) -> None:
        """Note that all buckets have arrived. The engine drains and exchanges the status."""

    def agreed(self, begun: float, ended: float) -> None:
        """Note that the host waited for the status of all ranks."""

    def end(self) -> None:
        """End the step."""


@dataclass(slots=True)
class Counters:
    """Cumulative figures of one engine.

    Attributes:
        trace: records times while a trace is on. Every part of an engine has the counters, so each tests one attribute.
        gradient_bytes: bytes of the running step's buckets.
        encode_seconds: host time of reductions up to their last request, plus merging, casting and starting requests.
        decode_seconds: host time of reductions after their last request.
        weightless_steps: weighted steps that were skipped because all ranks weighed 0.
        weight_skew: largest weight over the mean weight of the last weighted step, from 1 to W.
        weight_moved: ``sum(|n_r / sum(n) - 1 / W|) / 2`` of that step, the part of the average that the weights move between
            ranks, from 0 to 1 - 1 / W. Weighted and plain mean are at most this part of the largest distance between the
            gradients of two ranks apart. Their distance itself would take the plain mean, a second average.
        weight_divisor: divisor of the average of that step; the reduction's residuals are in units before the division.
    """

    steps: int = 0
    compressed_steps: int = 0
    hook_seconds: float = 0.0
    wait_seconds: float = 0.0
    encode_seconds: float = 0.0
    decode_seconds: float = 0.0
    traffic: Traffic = field(default_factory=Traffic)
    gradient_bytes: float = 0.0
    trace: StepTrace | None = None
    weightless_steps: int = 0
    weight_skew: float | None = None
    weight_moved: float = 0.0
    weight_divisor: float = 1.0
    _weights: Callable[[], Sequence[float]] | None = None  # of the last step, not read yet
    _before: tuple[float, int] = (0.0, 0)  # trip_bytes and rounds when the step began

    def begin(self) -> None:
        """Begin a step."""
        if self.trace is not None:
            self.trace.begin(self.steps)
        self.gradient_bytes, self._before = 0.0, (self.traffic.trip_bytes, self.traffic.rounds)

    @property
    def communicated(self) -> bool:
        """True if the running step has asked for a collective."""
        return self.traffic.rounds > self._before[1]

    def finish(self, trips: int) -> None:
        """Finish a step. It was compressed if it sent something, but less than ``trips`` times the gradient."""
        if self.trace is not None:
            self.trace.end()
        self.steps += 1
        self.compressed_steps += 0 < self.traffic.trip_bytes - self._before[0] < trips * self.gradient_bytes

    def weigh(self, weights: Callable[[], Sequence[float]]) -> None:
        """Take the weights of a weighted step. They are read later, because the host would wait for a GPU."""
        self._read_weights()
        self._weights = weights

    def _read_weights(self) -> None:
        if self._weights is None:
            return
        weights, self._weights = self._weights(), None
        total, world = math.fsum(weights), len(weights)
        if total == 0:
            self.weightless_steps += 1
        elif all(0 <= one < math.inf for one in weights):
            self.weight_skew, self.weight_divisor = max(weights) * world / total, total / world
            self.weight_moved = math.fsum(abs(one / total - 1 / world) for one in weights) / 2

    def as_dict(self) -> dict[str, float]:
        """Return the figures under their public names."""
        self._read_weights()
        weighted = (
            {} if self.weight_skew is None else {"weight_skew": self.weight_skew, "weight_moved": self.weight_moved}
        )
        if self.weight_skew is not None or self.weightless_steps:
            weighted["weightless_steps"] = float(self.weightless_steps)
        return weighted | {
            "steps": float(self.steps),
            "compressed_steps": float(self.compressed_steps),
            "payload_bytes": self.traffic.payload_bytes,
            "wire_bytes": self.traffic.wire_bytes,
            "between_bytes": self.traffic.between_bytes,
            "rounds": float(self.traffic.rounds),
            "hook_seconds": self.hook_seconds,
            "wait_seconds": self.wait_seconds,
            "encode_seconds": self.encode_seconds,
            "decode_seconds": self.decode_seconds,
        }


# -- sampled errors

Deliver = Callable[[int, Mapping[str, float]], None]
"""Receives the number of a step and its figures."""


@dataclass(slots=True, eq=False)
class Recording:
    """One recorder of an engine.

    Args:
        every: steps from one sample to the next.
        deliver: called with the figures of a sampled step when the next step begins.
    """

    every: int
    deliver: Deliver
    _steps: int = 0  # since the recorder was added

    def due(self) -> bool:
        """True if the recorder samples the step that begins. Call it once in each step."""
        self._steps += 1
        return (self._steps - 1) % self.every == 0


@dataclass(slots=True)
class _SampledBucket:
    """A bucket of a sampled step.

    Attributes:
        bucket: the bucket that the engine reduces.
        before: a copy of its gradients, to which the sampler adds the old residuals.
        sent: the reduction writes its own contribution here, if it reports one.
    """

    bucket: Bucket
    before: Bucket
    sent: Bucket | None


@dataclass(slots=True)
class _Sample:
    """Figures of one step and the recorders that receive them."""

    recordings: list[Recording]
    counters: dict[str, float]  # when the step began
    scale: float
    trips: int
    buckets: list[_SampledBucket] = field(default_factory=list)
    sums: HostCopy | None = None  # (3,): <p, p>, <r, r>, <p, r>


class Sampler:
    """Measures the error of some steps of one engine, for all its recorders.

    Let p be the gradient plus the old residual, and r the part of p that was not sent. The relative error is ‖r‖ / ‖p‖. The
    cosine is the one of p and p - r. Both cover the parameters whose r is known. The sampler reads numbers of a device after
    the status of the step, so the host does not wait for them.

    :meth:`begin`, :meth:`take` and :meth:`finish` log exceptions and stop sampling. Peers may wait in a collective meanwhile.

    Args:
        rank: this rank, for log messages.

    Attributes:
        recordings: all recorders. Those that want the same step share one sample.
    """

    __slots__ = ("_rank", "_sample", "recordings")

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.recordings: list[Recording] = []
        self._sample: _Sample | None = None

    def add(self, recording: Recording) -> None:
        """Sample for this recorder from the next step on."""
        self.recordings.append(recording)

    def remove(self, recording: Recording, counters: Counters) -> None:
        """Deliver the last complete sample, for which the host waits, then drop this recorder."""
        if recording in self.recordings:
            self._flush(counters, wait=True)
        self._drop(recording)

    def begin(self, reduction: Reduction, state: HookState, counters: Counters) -> None:
        """Begin a step. The engine knows the outcome of the previous step."""
        try:
            self._flush(counters)
            due = [recording for recording in self.recordings if recording.due()]
            if due and self._sample is None:
                self._sample = _Sample(due, _with_trips(counters), state.versions.loss_scale, reduction.trips)
        except Exception:
            self._stop()

    def take(self, bucket: Bucket, reduction: Reduction, state: HookState) -> Bucket | None:
        """Copy a bucket before it is reduced.

        Returns:
            The bucket in which the reduction reports its contribution; ``None`` if it need not.
        """
        # With two levels a rank rounds sums of its node, so its own gradient does not tell the error.
        if (
            self._sample is None
            or not reduction.lossy
            or reduction.levels
            or any(p.kind != "dense" for p in bucket.params)
        ):
            return None
        try:
            return _take(self._sample, bucket, reduction, state)
        except Exception:
            self._stop()
            return None

    def finish(self, reduction: Reduction, state: HookState) -> None:
        """Compute the figures. All buckets hold their averages, and new residuals are written."""
        sample = self._sample
        if sample is None or not sample.buckets:
            return
        try:
            buckets, sample.buckets = sample.buckets, []
            rows = [row for one in buckets for row in _products(one, reduction, state)]
            if rows:
                sample.sums = HostCopy(torch.stack([torch.stack(row) for row in rows]).sum(0))
        except Exception:
            self._stop()

    def abandon(self) -> None:
        """Drop the sample of a step that never finishes."""
        self._sample = None

    def _flush(self, counters: Counters, *, wait: bool = False) -> None:
        """Deliver the sample of a finished step. Without ``wait``, a sample that is still on the device is delivered
        one step later.
        """
        sample = self._sample
        if sample is None or counters.steps <= sample.counters["steps"]:
            return
        if not wait and sample.sums is not None and not sample.sums.arrived():
            return
        self._sample = None
        before, after = sample.counters, _with_trips(counters)
        steps = after["steps"] - before["steps"]
        spent = {
            key: (after[key] - before[key]) / steps for key in after if key in before and not key.endswith("steps")
        }
        figures = {key: value for key, value in spent.items() if key.endswith(("_bytes", "_seconds"))}
        trips = figures.pop("trip_bytes")
        figures |= {key: after[key] for key in ("weight_skew", "weight_moved") if key in after}
        if trips > 0 and counters.gradient_bytes:
            figures["ratio"] = sample.trips * counters.gradient_bytes / trips
        if sample.sums is not None:
            figures |= _figures(sample.sums.values(), sample.scale * counters.weight_divisor)
        for recording in list(sample.recordings):
            try:
                recording.deliver(int(before["steps"]), dict(figures))
            except Exception:  # a full disk or a lost server must not end the training
                log.exception("[rank %d] a telemetry writer raised, so its recorder is off now", self._rank)
                self._drop(recording)

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


def _take(sample: _Sample, bucket: Bucket, reduction: Reduction, state: HookState) -> Bucket | None:
    before = Bucket(bucket.layout, bucket.storage.clone(), bucket.index, bucket.is_last)
    sent = None
    if reduction.reports_sent:
        sent = Bucket(bucket.layout, torch.zeros_like(bucket.storage), bucket.index, bucket.is_last)
    elif RESIDUAL in reduction.fields:
        for p in bucket.params:
            residual = state.draft.found.get((p.name, RESIDUAL))
            if residual is not None:
                gradient = as_residual(before, p, reduction, state.step)
                gradient.add_(residual.numbers().view_as(gradient))
    else:
        return None  # neither a residual nor a report says which part was not sent
    sample.buckets.append(_SampledBucket(bucket, before, sent))
    return sent


def _products(one: _SampledBucket, reduction: Reduction, state: HookState) -> list[tuple[torch.Tensor, ...]]:
    """Return <p, p>, <r, r> and <p, r>, 0-d each, for every parameter whose r is known."""
    found: list[tuple[torch.Tensor, ...]] = []
    newest = state.draft.newest() if one.sent is None else {}
    for p in one.bucket.params:
        if not p.numel:
            continue
        if one.sent is not None:
            wanted = one.before.matrix(p)
            unsent = wanted - one.sent.matrix(p)
        elif (p.name, RESIDUAL) in newest:
            wanted = as_residual(one.before, p, reduction, state.step)
            unsent = newest[p.name, RESIDUAL].numbers().view_as(wanted)
        else:
            continue
        a, b = wanted.reshape(-1).float(), unsent.reshape(-1).float()
        found.append((torch.dot(a, a), torch.dot(b, b), torch.dot(a, b)))
    return found


def _figures(sums: Sequence[float], scale: float) -> dict[str, float]:
    pp, rr, pr = sums
    sent = pp - 2 * pr + rr  # <p - r, p - r>
    figures = {"residual_norm": math.sqrt(max(rr, 0.0)) / scale}
    if pp > 0:
        figures["relative_error"] = math.sqrt(max(rr, 0.0) / pp)
    if pp > 0 and sent > 0:
        figures["cosine"] = max(-1.0, min(1.0, (pp - pr) / math.sqrt(pp * sent)))
    return figures


def as_residual(bucket: Bucket, p: ParamLayout, reduction: Reduction, step: int) -> torch.Tensor:
    """Return a parameter of a bucket in the element order in which the reduction keeps its residual."""
    return bucket.matrix(p) if RESIDUAL in reduction.memory_order(p, step) else bucket.view(p)


def _with_trips(counters: Counters) -> dict[str, float]:
    return counters.as_dict() | {"trip_bytes": counters.traffic.trip_bytes}
