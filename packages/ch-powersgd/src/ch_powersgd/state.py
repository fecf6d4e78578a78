"""The state of PowerSGD's hooks, with the parameter names and defaults of PyTorch's."""

import logging
from typing import Any, Literal

import torch.distributed as dist

from ch_powersgd.reduction import BatchedPowerSGD, PowerSGD
from ch_powersgd.validation import at_least, flag, one_of, positive, whole
from commhooks.bucket import Bucket, BucketLayout
from commhooks.errors import HookConfigError
from commhooks.reduction import Reduction, Stages, StepContext
from commhooks.state import HookState

log = logging.getLogger("commhooks")


class PowerSGDState(HookState):
    """Configuration and memory of :func:`~ch_powersgd.powerSGD_hook` on one model.

    Args:
        process_group: the group to average over; ``None`` is the default group, looked up at the first backward.
        matrix_approximation_rank: rank of P and Q.
        start_powerSGD_iter: steps of plain averaging before the first compressed one.
        min_compression_rate: compress a matrix ``(n, m)`` if ``(n + m) * rank * rate < n * m``.
        use_error_feedback: add what was not sent to the next gradient.
        warm_start: go on from the last Q.
        orthogonalization_epsilon: added to the length of P's columns before they are normalised.
        random_seed: of the first Q.
        compression_stats_logging_frequency: compressed steps between two lines of statistics in the log.
        batch_tensors_with_same_shape: multiply matrices of one shape in one call.
        residual: ``"local"``, or ``"averaged"`` as in PyTorch.

    Raises:
        HookConfigError: a value out of range; a ``ValueError`` also where PyTorch raises one (a start below 2 with
            error feedback or warm start). ``PowerSGD(start_iter=0)`` has no such limit: its state is kept by parameter.

    Example:
        >>> state = PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=10)
        >>> state.iter, state.compression_stats()
        (0, (0.0, 0, 0))
        >>> import pickle
        >>> pickle.loads(pickle.dumps(state)).matrix_approximation_rank
        2
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        matrix_approximation_rank: int = 1,
        start_powerSGD_iter: int = 1_000,
        min_compression_rate: float = 2,
        use_error_feedback: bool = True,
        warm_start: bool = True,
        orthogonalization_epsilon: float = 0,
        random_seed: int = 0,
        compression_stats_logging_frequency: int = 10_000,
        batch_tensors_with_same_shape: bool = False,
        residual: Literal["local", "averaged"] = "local",
    ) -> None:
        super().__init__()
        self.process_group = process_group
        self.matrix_approximation_rank = whole("matrix_approximation_rank", matrix_approximation_rank, 1)
        self.start_powerSGD_iter = whole("start_powerSGD_iter", start_powerSGD_iter, 0)
        self.min_compression_rate = positive("min_compression_rate", min_compression_rate)
        self.use_error_feedback = flag("use_error_feedback", use_error_feedback)
        self.warm_start = flag("warm_start", warm_start)
        self.orthogonalization_epsilon = at_least("orthogonalization_epsilon", orthogonalization_epsilon, 0)
        self.random_seed = whole("random_seed", random_seed, 0)
        self.compression_stats_logging_frequency = whole(
            "compression_stats_logging_frequency", compression_stats_logging_frequency, 1
        )
        self.batch_tensors_with_same_shape = flag("batch_tensors_with_same_shape", batch_tensors_with_same_shape)
        self.residual = one_of("residual", residual, ("local", "averaged"))
        if (use_error_feedback or warm_start) and start_powerSGD_iter < 2:
            raise HookConfigError(
                f"start_powerSGD_iter={start_powerSGD_iter}: with error feedback or warm start PyTorch's state takes 2 "
                "or more, and so does this one; commhooks.attach(model, 'powersgd(start_iter=0)') has no such limit"
            )
        self.total_numel_before_compression = 0
        self.total_numel_after_compression = 0
        self.next_stats_report = 0

    @property
    def iter(self) -> int:
        """Steps taken so far: synchronised backward passes whose gradients were finite."""
        self.settle()
        return self.step

    def compression_stats(self) -> tuple[float, int, int]:
        """``(rate, elements before, elements sent)``, summed over all compressed steps of this rank."""
        before, after = self.total_numel_before_compression, self.total_numel_after_compression
        return (before / after if after else 0.0), before, after

    def reduction(self) -> PowerSGD:
        """What ``powerSGD_hook`` runs."""
        return _PowerSGD(self, {**self._config(), "batch": self.batch_tensors_with_same_shape})

    def batched_reduction(self) -> BatchedPowerSGD:
        """What ``batched_powerSGD_hook`` runs."""
        return _BatchedPowerSGD(self, self._config())

    def count(self, before: int, after: int, is_last: bool) -> None:
        """Add one bucket to the statistics, and log them when it is time."""
        self.total_numel_before_compression += before
        self.total_numel_after_compression += after
        if is_last and self.step >= self.next_stats_report:
            rate, total, sent = self.compression_stats()
            log.info("PowerSGD, step %d: %d elements sent as %d, rate %.1f", self.step, total, sent, rate)
            self.next_stats_report = self.step + self.compression_stats_logging_frequency

    def _config(self) -> dict[str, Any]:
        return {
            "rank": self.matrix_approximation_rank,
            "start_iter": self.start_powerSGD_iter,
            "min_compression_rate": self.min_compression_rate,
            "residual": self.residual,
            "error_feedback": self.use_error_feedback,
            "warm_start": self.warm_start,
            "epsilon": self.orthogonalization_epsilon,
            "seed": self.random_seed,
        }

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "process_group": None}


class _Counting(Reduction):
    """Mixed into a reduction: counts the elements of every compressed bucket into the state."""

    def __init__(self, state: PowerSGDState, config: dict[str, Any]) -> None:
        super().__init__(**config)
        self._state = state
        self._sent: dict[BucketLayout, int] = {}

    def start(self, bucket: Bucket, ctx: StepContext) -> Stages:
        if ctx.step >= self._state.start_powerSGD_iter and bucket.device.type != "meta":
            if bucket.layout not in self._sent:
                stages = self.plan(bucket.layout, ctx)
                self._sent[bucket.layout] = sum(request.numel for stage in stages for request in stage)
            self._state.count(bucket.layout.size, self._sent[bucket.layout], bucket.is_last)
        return super().start(bucket, ctx)


class _PowerSGD(_Counting, PowerSGD):
    pass


class _BatchedPowerSGD(_Counting, BatchedPowerSGD):
    pass
