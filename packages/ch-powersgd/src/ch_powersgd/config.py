"""PowerSGD's options, declared once: the hook's spec, their checks and the reduction follow.

Imports no torch, so that listing hooks stays quick.
"""

from dataclasses import dataclass
from typing import Any, Literal

from commhooks import Options, option


@dataclass(frozen=True, eq=False, repr=False)
class PowerSGDConfig(Options):
    """What PowerSGD can be told: each option with its default, its meaning and its limits."""

    rank: int = option(1, "of P and Q; capped by the matrix", at_least=1)
    start_iter: int = option(0, "steps of plain averaging before compression", at_least=0)
    min_compression_rate: float = option(2.0, "compress a matrix (n, m) if (n + m) * rank * rate < n * m", above=0.0)
    residual: Literal["local", "averaged"] = option(
        "local", "what error feedback subtracts: what this rank sent, or PyTorch's average"
    )
    error_feedback: bool = option(True, "add what was not sent to the next step's gradient")
    warm_start: bool = option(True, "start from the last step's Q; False draws a new one each step")
    epsilon: float = option(0.0, "added to the length of P's columns, in G's unit: damps shorter ones", at_least=0)
    seed: int = option(0, "of the first Q and of columns that a gradient left empty", at_least=0)
    batch: bool = option(False, "not read: equal shapes are batched where that saves launches")

    def config(self) -> dict[str, Any]:
        return {name: value for name, value in super().config().items() if name != "batch"}
