"""The public names of this package, and the modules that define them.

Type checkers read this file. `lazy` reads it, too, and imports a name when it is first used.
"""

from ch_fsdp.hooks import DefaultState as DefaultState
from ch_fsdp.hooks import LowPrecisionState as LowPrecisionState
from ch_fsdp.hooks import allreduce_hook as allreduce_hook
from ch_fsdp.hooks import bf16_compress_hook as bf16_compress_hook
from ch_fsdp.hooks import fp16_compress_hook as fp16_compress_hook
from ch_fsdp.hooks import reduce_scatter_hook as reduce_scatter_hook
