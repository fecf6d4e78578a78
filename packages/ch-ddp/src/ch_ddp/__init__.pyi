"""The public names of this package, and the modules that define them.

Type checkers read this file. `lazy` reads it, too, and imports a name when it is first used.
"""

from ch_ddp.adapter.binding import SlotBinding as SlotBinding
from ch_ddp.adapter.driver import DDPDriver as DDPDriver
from ch_ddp.adapter.driver import TensorFuture as TensorFuture
from ch_ddp.adapter.finalization import Finalizer as Finalizer
from ch_ddp.adapter.finalization import raise_finalized as raise_finalized
from ch_ddp.adapter.futures import behind_backward as behind_backward
from ch_ddp.adapter.futures import future_for as future_for
from ch_ddp.adapter.layout import averaged_params as averaged_params
from ch_ddp.adapter.slot import acquire_slot as acquire_slot
from ch_ddp.all_gather_grad import AllGatherGrad as AllGatherGrad
from ch_ddp.frameworks.trainer_hook import TrainerHook as TrainerHook
from ch_ddp.hooks import allreduce_hook as allreduce_hook
from ch_ddp.hooks import bf16_compress_hook as bf16_compress_hook
from ch_ddp.hooks import fp16_compress_hook as fp16_compress_hook
from ch_ddp.hooks import noop_hook as noop_hook
from ch_ddp.local_sgd.averagers import HierarchicalModelAverager as HierarchicalModelAverager
from ch_ddp.local_sgd.averagers import ModelAverager as ModelAverager
from ch_ddp.local_sgd.averagers import PeriodicModelAverager as PeriodicModelAverager
from ch_ddp.local_sgd.averagers import average_parameters as average_parameters
from ch_ddp.local_sgd.hook import PostLocalSGDState as PostLocalSGDState
from ch_ddp.local_sgd.hook import post_localSGD_hook as post_localSGD_hook
from ch_ddp.local_sgd.optimizer import PostLocalSGDOptimizer as PostLocalSGDOptimizer
from ch_ddp.optimizer_base import WrappedOptimizer as WrappedOptimizer
from ch_ddp.optimizer_base import needs_closure as needs_closure
from ch_ddp.optimizer_base import unscale as unscale
from ch_ddp.overlapped_optimizer import OverlappedOptimizer as OverlappedOptimizer
from ch_ddp.reductions import allreduce as allreduce
from ch_ddp.reductions import bf16_compress as bf16_compress
from ch_ddp.reductions import fp16_compress as fp16_compress
from ch_ddp.reductions import noop as noop
from ch_ddp.register import DDPCommHookType as DDPCommHookType
from ch_ddp.register import register_ddp_comm_hook as register_ddp_comm_hook
from ch_ddp.wrappers import bf16_compress_wrapper as bf16_compress_wrapper
from ch_ddp.wrappers import fp16_compress_wrapper as fp16_compress_wrapper
