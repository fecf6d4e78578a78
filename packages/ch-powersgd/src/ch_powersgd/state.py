"""The state of PowerSGD's hooks, with the parameter names and defaults of PyTorch's."""

import logging
from dataclasses import dataclass
from typing import Any, Literal

import torch.distributed as dist

from ch_powersgd.config import PowerSGDConfig
from ch_powersgd.reduction import BatchedPowerSGD, PowerSGD
from commhooks import Bucket, BucketLayout, HookConfigError, HookState, Param, Stages, StepContext

log = logging.getLogger("commhooks")
_FREQUENCY = Param(10_000, "compressed steps between two lines of statistics in the log", at_least=1)
_PARAMS = PowerSGDConfig.params()
_OURS = {  # PyTorch's names of PowerSGD's options
    "matrix_approximation_rank": "rank",
    "start_powerSGD_iter": "start_iter",
    "use_error_feedback": "error_feedback",
    "orthogonalization_epsilon": "epsilon",
    "random_seed": "seed",
    "batch_tensors_with_same_shape": "batch",
} | {name: name for name in ("min_compression_rate", "residual", "warm_start")}


@dataclass(eq=False, repr=False)
class PowerSGDState(HookState):
    """Configuration and memory of :func:`~ch_powersgd.powerSGD_hook` on one model.

    Args:
        process_group: the group to average over; ``None`` is the default group, looked up at the first backward.
        compression_stats_logging_frequency: compressed steps between two lines of statistics in the log.
        matrix_approximation_rank, ...: the options of :class:`~ch_powersgd.PowerSGD` under PyTorch's names (``rank``,
            ``start_iter``, ``epsilon`` and ``seed`` have longer ones), with PyTorch's defaults.

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

    process_group: dist.ProcessGroup | None = None
    matrix_approximation_rank: int = 1
    start_powerSGD_iter: int = 1_000
    min_compression_rate: float = 2
    use_error_feedback: bool = True
    warm_start: bool = True
    orthogonalization_epsilon: float = 0
    random_seed: int = 0
    compression_stats_logging_frequency: int = 10_000
    batch_tensors_with_same_shape: bool = False
    residual: Literal["local", "averaged"] = "local"

    def __post_init__(self) -> None:
        super().__init__()
        self.options()
        _FREQUENCY.checked("compression_stats_logging_frequency", self.compression_stats_logging_frequency)
        if (self.use_error_feedback or self.warm_start) and self.start_powerSGD_iter < 2:
            raise HookConfigError(
                f"start_powerSGD_iter={self.start_powerSGD_iter}: with error feedback or warm start PyTorch's state takes 2 "
                "or more, and so does this one; commhooks.attach(model, 'powersgd(start_iter=0)') has no such limit"
            )
        self.total_numel_before_compression = self.total_numel_after_compression = 0
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

    def options(self) -> dict[str, Any]:
        """PowerSGD's options as they are now, each checked under PyTorch's name for it."""
        return {ours: _PARAMS[ours].checked(theirs, getattr(self, theirs)) for theirs, ours in _OURS.items()}

    def reduction(self, batched: bool = False) -> PowerSGD:
        """What ``powerSGD_hook`` (or ``batched_powerSGD_hook``) runs."""
        return (_CountedBatched if batched else _Counted)(self)

    def __setstate__(self, kept: dict[str, Any]) -> None:
        config = kept.pop("config", None)  # of versions that held the options there
        given = {theirs: getattr(config, ours) for theirs, ours in _OURS.items()} if config is not None else {}
        super().__setstate__({**kept, **given})


class _Counted(PowerSGD):
    """Counts the elements of every compressed bucket into the state, and logs them when it is time."""

    def __init__(self, state: PowerSGDState) -> None:
        super().__init__(**state.options())
        self._state = state
        self._sent: dict[BucketLayout, int] = {}

    def start(self, bucket: Bucket, ctx: StepContext) -> Stages:
        state, layout = self._state, bucket.layout
        if self.phase(ctx.step) and bucket.device.type != "meta":
            if layout not in self._sent:
                self._sent[layout] = sum(request.numel for stage in self.plan(layout, ctx) for request in stage)
            state.total_numel_before_compression += layout.size
            state.total_numel_after_compression += self._sent[layout]
            if bucket.is_last and state.step >= state.next_stats_report:
                rate, total, sent = state.compression_stats()
                log.info("PowerSGD, step %d: %d elements sent as %d, rate %.1f", state.step, total, sent, rate)
                state.next_stats_report = state.step + state.compression_stats_logging_frequency
        return super().start(bucket, ctx)


class _CountedBatched(_Counted, BatchedPowerSGD):
    pass
