"""One outer optimizer for ranks far apart, over any reduction: DiLoCo, Streaming DiLoCo, SparseLoCo, MuLoCo.

The names are imported when first used, so that importing the package loads no torch.
"""

from typing import TYPE_CHECKING

from commhooks import lazy

if TYPE_CHECKING:
    from ch_outer.optimizer import OuterOptimizer
    from ch_outer.presets import diloco, muloco, nesterov, plain_sgd, sparseloco, streaming_diloco
    from ch_outer.schedule import Schedule

__all__ = [
    "OuterOptimizer",
    "Schedule",
    "diloco",
    "muloco",
    "nesterov",
    "plain_sgd",
    "sparseloco",
    "streaming_diloco",
]

__getattr__, __dir__ = lazy(
    __name__,
    {
        "optimizer": "OuterOptimizer",
        "presets": "diloco muloco nesterov plain_sgd sparseloco streaming_diloco",
        "schedule": "Schedule",
    },
)
