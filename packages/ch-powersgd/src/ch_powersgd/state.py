"""The state of PowerSGD's hooks, with the parameter names and defaults of PyTorch's."""

import logging
from typing import Any, Literal

import torch.distributed as dist

from ch_powersgd.config import TORCH_NAMES, PowerSGDConfig, checked
from ch_powersgd.reduction import BatchedPowerSGD, PowerSGD
from commhooks import Bucket, BucketLayout, HookConfigError, HookState, Param, Reduction, Stages, StepContext

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
        batch_tensors_with_same_shape: not read: matrices of one shape are batched where that saves launches.
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
        given = {name: value for name, value in locals().items() if name in TORCH_NAMES}
        super().__init__()
        self.process_group = process_group
        self.config = PowerSGDConfig.from_torch(given)
        self.compression_stats_logging_frequency: int = checked(
            "compression_stats_logging_frequency",
            compression_stats_logging_frequency,
            Param(10_000, "compressed steps between two lines of statistics in the log", at_least=1),
        )
        if (use_error_feedback or warm_start) and start_powerSGD_iter < 2:
            raise HookConfigError(
                f"start_powerSGD_iter={start_powerSGD_iter}: with error feedback or warm start PyTorch's state takes 2 "
                "or more, and so does this one; commhooks.attach(model, 'powersgd(start_iter=0)') has no such limit"
            )
        self.total_numel_before_compression = 0
        self.total_numel_after_compression = 0
        self.next_stats_report = 0

    def __getattr__(self, name: str) -> Any:
        """The options, under PyTorch's names."""
        ours = TORCH_NAMES.get(name)
        if ours is None or "config" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(self.config, ours)

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
        return _PowerSGD(self)

    def batched_reduction(self) -> BatchedPowerSGD:
        """What ``batched_powerSGD_hook`` runs."""
        return _BatchedPowerSGD(self)

    def count(self, before: int, after: int, is_last: bool) -> None:
        """Add one bucket to the statistics, and log them when it is time."""
        self.total_numel_before_compression += before
        self.total_numel_after_compression += after
        if is_last and self.step >= self.next_stats_report:
            rate, total, sent = self.compression_stats()
            log.info("PowerSGD, step %d: %d elements sent as %d, rate %.1f", self.step, total, sent, rate)
            self.next_stats_report = self.step + self.compression_stats_logging_frequency

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "process_group": None}

    def __setstate__(self, kept: dict[str, Any]) -> None:
        if "config" not in kept:  # pickled by 0.1.0, which held each option by itself
            given = {name: kept[name] for name in TORCH_NAMES}
            kept = {name: value for name, value in kept.items() if name not in given}
            kept["config"] = PowerSGDConfig.from_torch(given)
        super().__setstate__(kept)


class _Counting(Reduction):
    """Mixed into a reduction: counts the elements of every compressed bucket into the state."""

    def __init__(self, state: PowerSGDState) -> None:
        super().__init__(**state.config.options())
        self._state = state
        self._sent: dict[BucketLayout, int] = {}

    def start(self, bucket: Bucket, ctx: StepContext) -> Stages:
        if ctx.step >= self._state.config.start_iter and bucket.device.type != "meta":
            if bucket.layout not in self._sent:
                stages = self.plan(bucket.layout, ctx)
                self._sent[bucket.layout] = sum(request.numel for stage in stages for request in stage)
            self._state.count(bucket.layout.size, self._sent[bucket.layout], bucket.is_last)
        return super().start(bucket, ctx)


class _PowerSGD(_Counting, PowerSGD):
    pass


class _BatchedPowerSGD(_Counting, BatchedPowerSGD):
    pass
