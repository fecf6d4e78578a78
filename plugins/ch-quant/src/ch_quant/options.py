"""Options of the quantized hooks, declared once. Specs, checks and reductions read this declaration.

This module imports no torch, so that ``commhooks list`` stays fast.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from commhooks import HookConfigError, Option, Options, option

FEEDBACK = frozenset({"stateful", "error_feedback", "checkpointable"})
PRESETS: Mapping[str, int] = {"quant8": 8, "quant4": 4, "quant2": 2, "sign": 1}
"""Preset -> bits."""
FED = frozenset({"quant2", "sign"})
"""Presets with error feedback by default, because they lose too much without it."""


@dataclass(frozen=True, eq=False, repr=False)
class QuantOptions(Options):
    """Options of ``quant``, each with default, meaning and limits.

    Attributes:
        name: ``"quant"``, or a preset's name, which fixes ``bits``. It is not an option.

    Raises:
        HookConfigError: an option out of its limits, or options that contradict each other.
    """

    bits: Literal[8, 4, 2, 1] = option(4, "bits of a number on the wire")
    block: int = option(128, "elements that share a scale, a multiple of 16", at_least=16, at_most=65536)
    rounding: Literal["nearest", "stochastic"] = option(
        "nearest",
        "stochastic is without bias, and noisier",
        brings=frozenset({"stateful", "checkpointable"}),
        off=("nearest",),
    )
    rotation: Literal[None, "hadamard"] = option(None, "hadamard spreads large numbers over their block")
    error_feedback: bool = option(
        False, "keep the errors of both roundings, and send a quarter of them in every step", brings=FEEDBACK
    )
    residual: Literal["fp32", "int8"] = option("fp32", "format of the kept errors; int8 takes a quarter of fp32")
    exempt: bool = option(True, "average norms, biases and parameters smaller than a block exactly")
    kernel: Literal["torch", "triton"] = option(
        "torch", "arithmetic; triton: on CUDA, 8 and 4 bits, rounding='nearest'; same bytes", local=True
    )
    name: str = "quant"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block % 16:
            raise HookConfigError(f"block={self.block}: expected a multiple of 16, such as 128")
        if self.rotation and self.block & (self.block - 1):
            raise HookConfigError(f"block={self.block}: rotation='hadamard' takes a power of two, such as 128")
        if self.residual != "fp32" and not self.error_feedback:
            raise HookConfigError(
                f"residual={self.residual!r} without error_feedback has no effect: add error_feedback=True or omit residual="
            )
        if self.error_feedback and self.rounding == "stochastic" and self.bits <= 2:
            raise HookConfigError(
                f"bits={self.bits} with rounding='stochastic' may make errors larger than the gradient, so that the residual "
                "would grow without bound. Use rounding='nearest' or error_feedback=False"
            )


def preset_params(name: str) -> Mapping[str, Option]:
    """Return the declarations of a preset's options, or of ``quant`` itself."""
    params = dict(QuantOptions.options())
    if name in PRESETS:
        del params["bits"]
    if name in FED:
        params["error_feedback"] = replace(params["error_feedback"], default=True)
    return params
