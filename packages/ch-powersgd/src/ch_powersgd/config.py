"""PowerSGD's options, declared once: the hook's spec, their checks, the reduction and PyTorch's names follow.

Imports no torch, so that listing hooks stays quick.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from commhooks import HookConfigError, Param


def _option(default: Any, doc: str, torch_name: str = "", **limits: Any) -> Any:
    return field(default=default, metadata={"torch": torch_name, "param": Param(default, doc, **limits)})


@dataclass(frozen=True, eq=False)
class PowerSGDConfig:
    """What PowerSGD can be told: each option with its default, its meaning, PyTorch's name where that differs, and limits."""

    rank: int = _option(1, "of P and Q; capped by the matrix", "matrix_approximation_rank", at_least=1)
    start_iter: int = _option(0, "steps of plain averaging before compression", "start_powerSGD_iter", at_least=0)
    min_compression_rate: float = _option(2.0, "compress a matrix (n, m) if (n + m) * rank * rate < n * m", above=0.0)
    residual: Literal["local", "averaged"] = _option(
        "local",
        "what error feedback subtracts: what this rank sent, or PyTorch's average",
        choices=("local", "averaged"),
    )
    error_feedback: bool = _option(True, "add what was not sent to the next step's gradient", "use_error_feedback")
    warm_start: bool = _option(True, "start from the last step's Q; False draws a new one each step")
    epsilon: float = _option(
        0.0,
        "added to the length of P's columns, in G's unit: damps shorter ones",
        "orthogonalization_epsilon",
        at_least=0,
    )
    seed: int = _option(0, "of the first Q and of columns that a gradient left empty", "random_seed", at_least=0)
    batch: bool = _option(
        False, "not read: equal shapes are batched where that saves launches", "batch_tensors_with_same_shape"
    )

    def __post_init__(self) -> None:
        for name, param in PARAMS.items():
            object.__setattr__(self, name, checked(name, getattr(self, name), param))

    @classmethod
    def from_torch(cls, given: Mapping[str, Any]) -> "PowerSGDConfig":
        """Of values under PyTorch's names, each checked under the name that it was given by; other names are passed over."""
        return cls(**{ours: checked(name, given[name], PARAMS[ours]) for name, ours in TORCH_NAMES.items()})

    def config(self) -> dict[str, Any]:
        """Options that rebuild this."""
        return {name: getattr(self, name) for name in PARAMS if name != "batch"}


PARAMS: dict[str, Param] = {option.name: option.metadata["param"] for option in fields(PowerSGDConfig)}
TORCH_NAMES: dict[str, str] = {
    option.metadata["torch"] or option.name: option.name for option in fields(PowerSGDConfig)
}


def checked(name: str, value: Any, param: Param) -> Any:
    """``value`` as ``param`` takes it; ``HookConfigError`` where it does not."""
    try:
        return param.check(value)
    except ValueError:
        raise HookConfigError(f"{name}={value!r}: expected {param.accepts()} ({param.doc})") from None
