"""Adapter for ``DistributedDataParallel``, with the parts that classes derived from DDP build on."""

from typing import TYPE_CHECKING

from commhooks import lazy

if TYPE_CHECKING:
    from ch_ddp.adapter.driver import DDPDriver, TensorFuture
    from ch_ddp.adapter.finalization import Finalizer, raise_finalized
    from ch_ddp.adapter.foreign import ForeignDriver
    from ch_ddp.adapter.futures import behind_backward, future_for
    from ch_ddp.adapter.layout import averaged, model_layout
    from ch_ddp.adapter.slot import acquire_slot

__all__ = [
    "DDPDriver",
    "Finalizer",
    "ForeignDriver",
    "TensorFuture",
    "acquire_slot",
    "averaged",
    "behind_backward",
    "future_for",
    "model_layout",
    "raise_finalized",
]

__getattr__, __dir__ = lazy(
    __name__,
    {
        "finalization": "Finalizer raise_finalized",
        "driver": "DDPDriver TensorFuture",
        "foreign": "ForeignDriver",
        "futures": "behind_backward future_for",
        "layout": "averaged model_layout",
        "slot": "acquire_slot",
    },
)
