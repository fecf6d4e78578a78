"""State of PowerSGD's plain hooks, with the argument names and defaults of PyTorch's ``PowerSGDState``."""

import logging
import weakref
from dataclasses import dataclass
from typing import Any, Literal

import torch.distributed as dist

from ch_powersgd.config import PowerSGDConfig
from ch_powersgd.powersgd import BatchedPowerSGD, PowerSGD
from commhooks import Bucket, BucketLayout, HookConfigError, HookState, Option, Stages, StepContext

log = logging.getLogger("commhooks")
_STATS_FREQUENCY = Option(10_000, "compressed steps between two lines of statistics in the log", at_least=1)
_PARAMS = PowerSGDConfig.options()
_OPTION_OF = {  # PyTorch's argument -> option of PowerSGD
    "matrix_approximation_rank": "rank",
    "start_powerSGD_iter": "start_iter",
    "use_error_feedback": "error_feedback",
    "orthogonalization_epsilon": "epsilon",
    "random_seed": "seed",
} | {name: name for name in ("min_compression_rate", "residual", "warm_start")}


@dataclass(eq=False, repr=False)
class PowerSGDState(HookState):
    """Configuration and memory of :func:`~ch_powersgd.powerSGD_hook` on one model.

    Args:
        process_group: group to average over. None means the default group, which the first backward looks up.
        compression_stats_logging_frequency: compressed steps between two lines of statistics in the log.
        batch_tensors_with_same_shape: accepted for compatibility and ignored. Equal shapes form a batch automatically
            on devices with kernel launches.
        matrix_approximation_rank, ...: options of :class:`~ch_powersgd.PowerSGD` under PyTorch's names and with
            PyTorch's defaults.

    Raises:
        HookConfigError: an option is out of range, or ``start_powerSGD_iter`` is below 2 with error feedback or warm
            start, as in PyTorch. It is a ``ValueError`` too. ``PowerSGD(start_iter=0)`` has no such limit.

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
        _STATS_FREQUENCY.checked("compression_stats_logging_frequency", self.compression_stats_logging_frequency)
        if (self.use_error_feedback or self.warm_start) and self.start_powerSGD_iter < 2:
            raise HookConfigError(
                f"start_powerSGD_iter={self.start_powerSGD_iter} is too small: error feedback and warm start need 2 or more, "
                "as in PyTorch. commhooks.attach(model, 'powersgd(start_iter=0)') has no such limit"
            )
        self.total_numel_before_compression = self.total_numel_after_compression = 0
        self.next_stats_report = 0

    @property
    def iter(self) -> int:
        """Number of steps so far: synchronised backward passes with finite gradients."""
        self.resolve_step()
        return self.step

    def compression_stats(self) -> tuple[float, int, int]:
        """Return ``(rate, elements before, elements sent)``, summed over all compressed steps of this rank."""
        before, after = self.total_numel_before_compression, self.total_numel_after_compression
        return (before / after if after else 0.0), before, after

    def options(self) -> dict[str, Any]:
        """Return the current options of PowerSGD. Errors name PyTorch's argument."""
        return {
            option: _PARAMS[option].checked(argument, getattr(self, argument))
            for argument, option in _OPTION_OF.items()
        }

    def reduction(self, batched: bool = False) -> PowerSGD:
        """Return the reduction that ``powerSGD_hook`` (or ``batched_powerSGD_hook``) runs."""
        return (_CountedBatched if batched else _Counted)(self)


class _Counted(PowerSGD):
    """Counts the elements of compressed buckets in the state, and logs the totals at the chosen frequency."""

    def __init__(self, state: PowerSGDState) -> None:
        super().__init__(**state.options())
        self._state: PowerSGDState = weakref.proxy(state)  # the state keeps the engine that has this reduction
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
