"""Quantized hooks: blocks of 8, 4, 3, 2 or 1 bits in two stages, and PyTorch's two affine ones.

The names are imported when first used: commhooks imports this package to list what it offers, and listing must not
load torch.
"""

from typing import TYPE_CHECKING

from commhooks import lazy

if TYPE_CHECKING:
    from ch_quant.affine import AffineGather, quantize_per_channel, quantize_per_tensor
    from ch_quant.codec import Codec
    from ch_quant.exchange import Exchange, all_reduce, reduce_scatter
    from ch_quant.family import Quantized, quant2, quant4, quant8, sign
    from ch_quant.feedback import Feedback, PackedFeedback
    from ch_quant.hooks import quant8_hook, quantization_perchannel_hook, quantization_pertensor_hook

__all__ = [
    "AffineGather",
    "Codec",
    "Exchange",
    "Feedback",
    "PackedFeedback",
    "Quantized",
    "all_reduce",
    "quant2",
    "quant4",
    "quant8",
    "quant8_hook",
    "quantization_perchannel_hook",
    "quantization_pertensor_hook",
    "quantize_per_channel",
    "quantize_per_tensor",
    "reduce_scatter",
    "sign",
]

__getattr__, __dir__ = lazy(
    __name__,
    {
        "affine": "AffineGather quantize_per_channel quantize_per_tensor",
        "codec": "Codec",
        "exchange": "Exchange all_reduce reduce_scatter",
        "feedback": "Feedback PackedFeedback",
        "family": "Quantized quant2 quant4 quant8 sign",
        "hooks": "quant8_hook quantization_perchannel_hook quantization_pertensor_hook",
    },
)
