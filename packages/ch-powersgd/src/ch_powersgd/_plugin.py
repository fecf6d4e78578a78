"""Hook specs of ch-powersgd. This module imports no torch."""

from collections.abc import Iterable

from ch_powersgd.config import PowerSGDConfig
from commhooks import HookSpec, hookimpl

_SUMMARIES = {
    "PowerSGD": "sends a low-rank approximation of each weight's gradient, with error feedback",
    "BatchedPowerSGD": "low-rank approximation of a whole bucket as one square matrix; depends on bucket_cap_mb",
}


@hookimpl
def commhooks_specs() -> Iterable[HookSpec]:
    """Yield PowerSGD per parameter and PowerSGD per bucket."""
    for target, summary in _SUMMARIES.items():
        name = target.lower().replace("batched", "batched_")
        yield HookSpec(
            name,
            "reduction",
            f"ch_powersgd:{target}",
            summary,
            hook=f"ch_powersgd:{name.replace('powersgd', 'powerSGD')}_hook",
            state="ch_powersgd:PowerSGDState",
            options=PowerSGDConfig.options(),
            capabilities=frozenset({"lossy", "stateful", "error_feedback", "checkpointable"}),
            example=f"{name}(rank=4)",
            paper="https://arxiv.org/abs/1905.13727",
        )
