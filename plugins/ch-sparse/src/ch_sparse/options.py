"""Options of the sparse hooks, declared once. Specs, checks and reductions read this declaration.

This module imports no torch, so that ``commhooks list`` stays fast.
"""

from dataclasses import dataclass
from typing import Literal

from commhooks import HookConfigError, Options, option

_FEEDBACK = frozenset({"stateful", "error_feedback", "checkpointable"})


@dataclass(frozen=True, eq=False, repr=False)
class SparseOptions(Options):
    """Options that both sparse hooks have.

    Raises:
        HookConfigError: an option out of its limits, or ``decay`` without ``feedback``.
    """

    feedback: bool = option(True, "keep entries that were not sent for the next step, in fp32", brings=_FEEDBACK)
    decay: float = option(1.0, "factor on the kept entries in each step; 1 loses nothing", above=0.0, at_most=1.0)
    exempt: bool = option(True, "average norms, biases and parameters of fewer than 1 / density elements exactly")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.decay != 1.0 and not self.feedback:
            raise HookConfigError(
                f"decay={self.decay!r} without feedback has no residual to decay. Omit it or set feedback=True"
            )


@dataclass(frozen=True, eq=False, repr=False)
class _TopK(Options):
    density: float = option(0.01, "part of the entries that is sent", above=0.0, at_most=1.0)
    chunk: int = option(4096, "elements among which the largest are chosen", at_least=16, at_most=65536)
    bits: Literal[32, 16, 2] = option(16, "bits of a value: fp32, bf16, or a sign and one of two levels of its chunk")


@dataclass(frozen=True, eq=False, repr=False)
class _RandomK(Options):
    density: float = option(
        0.05, "part of the entries that is sent; round(1 / density) elements are a stratum", above=0.0, at_most=1.0
    )
    seed: int = option(0, "seed of the choice, the same on all ranks")


@dataclass(frozen=True, eq=False, repr=False)
class TopKOptions(SparseOptions, _TopK):
    """Options of ``topk``: its own, then the common ones (dataclasses take the fields of the last base first)."""


@dataclass(frozen=True, eq=False, repr=False)
class RandomKOptions(SparseOptions, _RandomK):
    """Options of ``randomk``: its own, then the common ones."""
