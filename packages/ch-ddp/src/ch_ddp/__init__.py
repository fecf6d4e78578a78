"""DDP communication hooks and wrappers, with the names and signatures of PyTorch.

Imported lazily, so that listing hooks does not load torch.
"""

from typing import TYPE_CHECKING

from commhooks.lazy import lazy

if TYPE_CHECKING:
    from ch_ddp.averagers import HierarchicalModelAverager, ModelAverager, PeriodicModelAverager
    from ch_ddp.averaging import average_parameters
    from ch_ddp.gathering import AllGatherGrad
    from ch_ddp.hooks import allreduce_hook, bf16_compress_hook, fp16_compress_hook, noop_hook
    from ch_ddp.local_sgd import PostLocalSGDState, post_localSGD_hook
    from ch_ddp.local_sgd_optimizer import PostLocalSGDOptimizer
    from ch_ddp.overlap import OverlappedOptimizer
    from ch_ddp.reductions import allreduce, bf16_compress, fp16_compress, noop
    from ch_ddp.registering import DDPCommHookType, register_ddp_comm_hook
    from ch_ddp.wrappers import bf16_compress_wrapper, fp16_compress_wrapper

__all__ = [
    "AllGatherGrad",
    "DDPCommHookType",
    "HierarchicalModelAverager",
    "ModelAverager",
    "OverlappedOptimizer",
    "PeriodicModelAverager",
    "PostLocalSGDOptimizer",
    "PostLocalSGDState",
    "allreduce",
    "allreduce_hook",
    "average_parameters",
    "bf16_compress",
    "bf16_compress_hook",
    "bf16_compress_wrapper",
    "fp16_compress",
    "fp16_compress_hook",
    "fp16_compress_wrapper",
    "noop",
    "noop_hook",
    "post_localSGD_hook",
    "register_ddp_comm_hook",
]

__getattr__, __dir__ = lazy(
    __name__,
    {
        "averagers": "HierarchicalModelAverager ModelAverager PeriodicModelAverager",
        "averaging": "average_parameters",
        "gathering": "AllGatherGrad",
        "hooks": "allreduce_hook bf16_compress_hook fp16_compress_hook noop_hook",
        "local_sgd": "PostLocalSGDState post_localSGD_hook",
        "local_sgd_optimizer": "PostLocalSGDOptimizer",
        "reductions": "allreduce bf16_compress fp16_compress noop",
        "overlap": "OverlappedOptimizer",
        "registering": "DDPCommHookType register_ddp_comm_hook",
        "wrappers": "bf16_compress_wrapper fp16_compress_wrapper",
    },
)
