"""Options of PowerSGD, declared once. The hook's spec, the checks and the reduction all read this declaration.

This module imports no torch, so that ``commhooks list`` stays fast.
"""

from dataclasses import dataclass
from typing import Literal

from commhooks import Options, option


@dataclass(frozen=True, eq=False, repr=False)
class PowerSGDConfig(Options):
    """Options of PowerSGD, each with default, meaning and limits."""

    rank: int = option(
        1,
        "columns of P and Q, at most the matrix's smaller side; 1 as in PyTorch; 4 is closer, at 4 times the bytes",
        at_least=1,
    )
    start_iter: int = option(0, "steps of plain averaging before compression starts", at_least=0)
    min_compression_rate: float = option(2.0, "compress a matrix (n, m) if (n + m) * rank * rate < n * m", above=0.0)
    residual: Literal["local", "averaged"] = option(
        "local", "error feedback subtracts this rank's own message (local) or the average, as PyTorch does (averaged)"
    )
    error_feedback: bool = option(True, "add the residual to the next step's gradient")
    warm_start: bool = option(True, "start from the previous step's Q; False draws a new Q at each step")
    epsilon: float = option(0.0, "added to the length of P's columns, in G's unit; damps shorter columns", at_least=0)
    seed: int = option(0, "seed of the first Q and of columns that a gradient left empty", at_least=0)
