"""Quantized hooks: blocks of 8, 4, 3, 2 or 1 bits in two stages, and PyTorch's two affine ones.

Names are imported at first use: ``commhooks list`` imports this package and must not load torch.
"""

from typing import TYPE_CHECKING

from commhooks import lazy

if TYPE_CHECKING:
    from ch_quant.affine import AffineGather, quantize_per_channel, quantize_per_tensor
    from ch_quant.codec import Codec
    from ch_quant.exchange import TwoStageExchange, all_reduce, reduce_scatter
    from ch_quant.feedback import Feedback, PackedFeedback
    from ch_quant.hooks import quant8_hook, quantization_perchannel_hook, quantization_pertensor_hook
    from ch_quant.options import QuantOptions
    from ch_quant.quantized import Quantized, quant2, quant4, quant8, sign

__all__ = [
    "AffineGather",
    "Codec",
    "Feedback",
    "PackedFeedback",
    "QuantOptions",
    "Quantized",
    "TwoStageExchange",
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
        "exchange": "TwoStageExchange all_reduce reduce_scatter",
        "feedback": "Feedback PackedFeedback",
        "quantized": "Quantized quant2 quant4 quant8 sign",
        "options": "QuantOptions",
        "hooks": "quant8_hook quantization_perchannel_hook quantization_pertensor_hook",
    },
)
