"""Hook specs of ch-powersgd. This module imports no torch."""

from collections.abc import Iterable

from ch_powersgd.config import PowerSGDConfig
from commhooks import HookSpec, hookimpl

_SUMMARIES = {
    "PowerSGD": "sends a low-rank approximation of each weight's gradient, with error feedback",
    "BatchedPowerSGD": "low-rank approximation of a whole bucket as one square matrix; depends on bucket_cap_mb",
}

_WHEN = {
    "PowerSGD": "a slow link and large weight matrices; norms, biases and narrow weights are averaged exactly",
    "BatchedPowerSGD": "to reproduce PyTorch's batched variant; powersgd lost less in every run",
}
_LOSS = {
    "PowerSGD": "rank 4: +0.18 nats held-out on the text GPT (AdamW, 1200 steps); exact steps first (start_iter) lose less",
    "BatchedPowerSGD": "rank 4: +0.82 nats on the text GPT (Adam, 200 steps), 3.7 to 6.0 points of accuracy on a CNN",
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
            group="low-rank",
            recommended=name == "powersgd",
            when=_WHEN[target],
            loss=_LOSS[target],
        )
