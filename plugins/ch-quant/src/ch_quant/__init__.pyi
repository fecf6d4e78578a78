"""The public names of this package, and the modules that define them.

Type checkers read this file. `lazy` reads it, too, and imports a name when it is first used.
"""

from ch_quant.affine import AffineGather as AffineGather
from ch_quant.affine import quantize_per_channel as quantize_per_channel
from ch_quant.affine import quantize_per_tensor as quantize_per_tensor
from ch_quant.codec import Codec as Codec
from ch_quant.exchange import TwoStageExchange as TwoStageExchange
from ch_quant.exchange import all_reduce as all_reduce
from ch_quant.exchange import reduce_scatter as reduce_scatter
from ch_quant.feedback import Feedback as Feedback
from ch_quant.feedback import PackedFeedback as PackedFeedback
from ch_quant.hooks import quant8_hook as quant8_hook
from ch_quant.hooks import quantization_perchannel_hook as quantization_perchannel_hook
from ch_quant.hooks import quantization_pertensor_hook as quantization_pertensor_hook
from ch_quant.options import QuantOptions as QuantOptions
from ch_quant.quantized import Quantized as Quantized
from ch_quant.quantized import quant2 as quant2
from ch_quant.quantized import quant4 as quant4
from ch_quant.quantized import quant8 as quant8
from ch_quant.quantized import sign as sign
