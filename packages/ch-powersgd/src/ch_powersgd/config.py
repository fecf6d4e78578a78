"""PowerSGD's options, declared once: the hook's spec, their checks, the reduction and PyTorch's names follow.

Imports no torch, so that listing hooks stays quick.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from commhooks import HookConfigError, Param


def _option(torch_name: str, default: Any, doc: str, **limits: Any) -> Any:
    return field(default=default, metadata={"torch": torch_name, "param": Param(default, doc, **limits)})


@dataclass(frozen=True, eq=False)
class PowerSGDConfig:
    """What PowerSGD can be told: each option with PyTorch's name for it, its default, its meaning and its limits.

    Raises:
        HookConfigError: a value out of range.

    Example:
        >>> PowerSGDConfig(rank=0)
        Traceback (most recent call last):
        ...
        commhooks.errors.HookConfigError: rank=0: expected an int >= 1 (of P and Q; capped by the matrix)
    """

    rank: int = _option("matrix_approximation_rank", 1, "of P and Q; capped by the matrix", at_least=1)
    start_iter: int = _option("start_powerSGD_iter", 0, "steps of plain averaging before compression", at_least=0)
    min_compression_rate: float = _option(
        "min_compression_rate", 2.0, "compress a matrix (n, m) if (n + m) * rank * rate < n * m", above=0.0
    )
    residual: Literal["local", "averaged"] = _option(
        "residual",
        "local",
        "what error feedback keeps: this rank's own residual, or PyTorch's, against the average",
        choices=("local", "averaged"),
    )
    error_feedback: bool = _option("use_error_feedback", True, "add what was not sent to the next step's gradient")
    warm_start: bool = _option("warm_start", True, "start from the last step's Q; False draws a new one each step")
    epsilon: float = _option(
        "orthogonalization_epsilon",
        0.0,
        "added to the length of P's columns, in the gradient's unit: directions much shorter are damped",
        at_least=0.0,
    )
    seed: int = _option("random_seed", 0, "of the first Q and of columns that a gradient left empty", at_least=0)
    batch: bool = _option(
        "batch_tensors_with_same_shape", False, "not read: equal shapes are batched where that saves kernel launches"
    )

    def __post_init__(self) -> None:
        for name, param in self.params().items():
            object.__setattr__(self, name, checked(name, getattr(self, name), param))

    @classmethod
    def params(cls) -> dict[str, Param]:
        """The options as the registry knows them."""
        return {option.name: option.metadata["param"] for option in fields(cls)}

    @classmethod
    def from_torch(cls, given: Mapping[str, Any]) -> "PowerSGDConfig":
        """Built from options under PyTorch's names, each checked under the name that it was given by."""
        params = cls.params()
        return cls(**{TORCH_NAMES[n]: checked(n, value, params[TORCH_NAMES[n]]) for n, value in given.items()})

    def options(self) -> dict[str, Any]:
        """What rebuilds this configuration."""
        return {name: getattr(self, name) for name in self.params() if name != "batch"}


TORCH_NAMES = {option.metadata["torch"]: option.name for option in fields(PowerSGDConfig)}
"""PyTorch's name of each option -> ours."""


def checked(name: str, value: Any, param: Param) -> Any:
    """``value`` as ``param`` takes it.

    Raises:
        HookConfigError: it does not.
    """
    try:
        return param.check(value)
    except ValueError:
        raise HookConfigError(f"{name}={value!r}: expected {param.accepts()} ({param.doc})") from None
