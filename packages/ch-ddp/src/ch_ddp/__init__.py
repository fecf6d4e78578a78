"""DDP communication hooks and wrappers, with the names and signatures of PyTorch.

Imported lazily, so that listing hooks does not load torch.
"""

from typing import TYPE_CHECKING

from commhooks.lazy import lazy

if TYPE_CHECKING:
    from ch_ddp.averagers import HierarchicalModelAverager, ModelAverager, PeriodicModelAverager
    from ch_ddp.averaging import average_parameters
    from ch_ddp.hooks import allreduce_hook, bf16_compress_hook, fp16_compress_hook, noop_hook
    from ch_ddp.local_sgd import PostLocalSGDState, post_localSGD_hook
    from ch_ddp.local_sgd_optimizer import PostLocalSGDOptimizer
    from ch_ddp.reductions import allreduce, bf16_compress, fp16_compress, noop
    from ch_ddp.wrappers import bf16_compress_wrapper, fp16_compress_wrapper

__all__ = [
    "HierarchicalModelAverager",
    "ModelAverager",
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
]

__getattr__, __dir__ = lazy(
    __name__,
    {
        "averagers": "HierarchicalModelAverager ModelAverager PeriodicModelAverager",
        "averaging": "average_parameters",
        "hooks": "allreduce_hook bf16_compress_hook fp16_compress_hook noop_hook",
        "local_sgd": "PostLocalSGDState post_localSGD_hook",
        "local_sgd_optimizer": "PostLocalSGDOptimizer",
        "reductions": "allreduce bf16_compress fp16_compress noop",
        "wrappers": "bf16_compress_wrapper fp16_compress_wrapper",
    },
)
