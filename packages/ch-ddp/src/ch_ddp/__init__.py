"""DDP communication hooks and wrappers, with the names and signatures of PyTorch.

Imported lazily, so that listing hooks does not load torch.
"""

from typing import TYPE_CHECKING

from commhooks import lazy

if TYPE_CHECKING:
    from ch_ddp.all_gather_grad import AllGatherGrad
    from ch_ddp.hooks import allreduce_hook, bf16_compress_hook, fp16_compress_hook, noop_hook
    from ch_ddp.local_sgd.averagers import (
        HierarchicalModelAverager,
        ModelAverager,
        PeriodicModelAverager,
        average_parameters,
    )
    from ch_ddp.local_sgd.hook import PostLocalSGDState, post_localSGD_hook
    from ch_ddp.local_sgd.optimizer import PostLocalSGDOptimizer
    from ch_ddp.optimizer_base import WrappedOptimizer, needs_closure
    from ch_ddp.overlapped_optimizer import OverlappedOptimizer
    from ch_ddp.reductions import allreduce, bf16_compress, fp16_compress, noop
    from ch_ddp.register import DDPCommHookType, register_ddp_comm_hook
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
    "WrappedOptimizer",
    "allreduce",
    "allreduce_hook",
    "average_parameters",
    "bf16_compress",
    "bf16_compress_hook",
    "bf16_compress_wrapper",
    "fp16_compress",
    "fp16_compress_hook",
    "fp16_compress_wrapper",
    "needs_closure",
    "noop",
    "noop_hook",
    "post_localSGD_hook",
    "register_ddp_comm_hook",
]

__getattr__, __dir__ = lazy(
    __name__,
    {
        "optimizer_base": "WrappedOptimizer needs_closure",
        "all_gather_grad": "AllGatherGrad",
        "hooks": "allreduce_hook bf16_compress_hook fp16_compress_hook noop_hook",
        "local_sgd.averagers": "average_parameters HierarchicalModelAverager ModelAverager PeriodicModelAverager",
        "local_sgd.hook": "PostLocalSGDState post_localSGD_hook",
        "local_sgd.optimizer": "PostLocalSGDOptimizer",
        "overlapped_optimizer": "OverlappedOptimizer",
        "reductions": "allreduce bf16_compress fp16_compress noop",
        "register": "DDPCommHookType register_ddp_comm_hook",
        "wrappers": "bf16_compress_wrapper fp16_compress_wrapper",
    },
)
