"""PowerSGD gradient compression (Vogels, Karimireddy, Jaggi 2019, arXiv:1905.13727).

Imported lazily, so that listing hooks does not load torch.
"""

from typing import TYPE_CHECKING

from commhooks import lazy

if TYPE_CHECKING:
    from ch_powersgd.hooks import batched_powerSGD_hook, powerSGD_hook
    from ch_powersgd.reduction import BatchedPowerSGD, PowerSGD
    from ch_powersgd.state import PowerSGDState

__all__ = ["BatchedPowerSGD", "PowerSGD", "PowerSGDState", "batched_powerSGD_hook", "powerSGD_hook"]

__getattr__, __dir__ = lazy(
    __name__,
    {
        "hooks": "batched_powerSGD_hook powerSGD_hook",
        "reduction": "BatchedPowerSGD PowerSGD",
        "state": "PowerSGDState",
    },
)
