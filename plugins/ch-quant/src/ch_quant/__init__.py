"""8-bit hooks: block-scaled two-stage all-reduce, and PyTorch's two affine ones.

The names are imported when first used: commhooks imports this package to list what it offers, and listing must not
load torch.
"""

from typing import TYPE_CHECKING

from commhooks import lazy

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

__getattr__, __dir__ = lazy(
    __name__,
    {
        "affine": "AffineGather quantize_per_channel quantize_per_tensor",
        "blocks": "BlockQuantized",
        "hooks": "quant8_hook quantization_perchannel_hook quantization_pertensor_hook",
    },
)
