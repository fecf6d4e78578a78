"""What ch-powersgd provides, as data; importing this loads no torch."""

from collections.abc import Iterable

from commhooks import HookSpec, Param, hookimpl

_PAPER = "https://arxiv.org/abs/1905.13727"
_CAPABILITIES = frozenset({"lossy", "stateful", "error_feedback", "checkpointable"})
_COMMON = {
    "rank": Param(1, "rank of the approximation: P is (rows, rank), Q is (columns, rank)", at_least=1),
    "start_iter": Param(0, "steps of plain averaging before compression starts", at_least=0),
    "residual": Param(
        "local",
        "what error feedback keeps: this rank's own residual, or PyTorch's, against the average",
        choices=("local", "averaged"),
    ),
    "error_feedback": Param(True, "add what was not sent to the next step's gradient"),
    "warm_start": Param(True, "start from the last step's Q; False draws a new one each step"),
    "min_compression_rate": Param(2.0, "compress a matrix only if that shrinks it by more than this factor", above=0.0),
    "epsilon": Param(0.0, "added to the length of P's columns: directions much shorter are damped", at_least=0.0),
    "seed": Param(0, "of the first Q; the same on every rank", at_least=0),
}


@hookimpl
def commhooks_specs() -> Iterable[HookSpec]:
    """PowerSGD per parameter, and the variant that treats a bucket as one matrix."""
    return (
        HookSpec(
            "powersgd",
            "reduction",
            "ch_powersgd:PowerSGD",
            "sends a low-rank approximation of each weight's gradient, with error feedback",
            hook="ch_powersgd:powerSGD_hook",
            state="ch_powersgd:PowerSGDState",
            params={
                **_COMMON,
                "batch": Param(False, "multiply matrices of one shape together"),
            },
            capabilities=_CAPABILITIES,
            example="powersgd(rank=4)",
            paper=_PAPER,
        ),
        HookSpec(
            "batched_powersgd",
            "reduction",
            "ch_powersgd:BatchedPowerSGD",
            "low-rank approximation of a whole bucket as one square matrix; depends on bucket_cap_mb",
            hook="ch_powersgd:batched_powerSGD_hook",
            state="ch_powersgd:PowerSGDState",
            params=dict(_COMMON),
            capabilities=_CAPABILITIES,
            example="batched_powersgd(rank=4)",
            paper=_PAPER,
        ),
    )
