"""8-bit hooks: block-scaled two-stage all-reduce, and PyTorch's two affine ones.

The names are imported when first used: commhooks imports this package to list what it offers, and listing must not
load torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ch_quant.affine import AffineGather, quantize_per_channel, quantize_per_tensor
    from ch_quant.blocks import BlockQuantized
    from ch_quant.hooks import quant8_hook, quantization_perchannel_hook, quantization_pertensor_hook

__all__ = [
    "AffineGather",
    "BlockQuantized",
    "quant8_hook",
    "quantization_perchannel_hook",
    "quantization_pertensor_hook",
    "quantize_per_channel",
    "quantize_per_tensor",
]

_HOMES = {
    "AffineGather": "affine",
    "BlockQuantized": "blocks",
    "quant8_hook": "hooks",
    "quantization_perchannel_hook": "hooks",
    "quantization_pertensor_hook": "hooks",
    "quantize_per_channel": "affine",
    "quantize_per_tensor": "affine",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'ch_quant' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(f"ch_quant.{_HOMES[name]}"), name)
