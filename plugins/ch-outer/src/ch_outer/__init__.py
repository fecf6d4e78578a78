"""One outer optimizer for ranks that are far apart, over any reduction: DiLoCo, Streaming DiLoCo, SparseLoCo, MuLoCo.

Names are imported at their first use, so importing the package does not load torch.
"""

from typing import TYPE_CHECKING

from commhooks import lazy

if TYPE_CHECKING:
    from ch_outer.optimizer import OuterOptimizer
    from ch_outer.outer_sgd import nesterov, plain_sgd
    from ch_outer.presets import diloco, muloco, sparseloco, streaming_diloco
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
        "outer_sgd": "nesterov plain_sgd",
        "presets": "diloco muloco sparseloco streaming_diloco",
        "schedule": "Schedule",
    },
)
