"""PowerSGD gradient compression (Vogels, Karimireddy, Jaggi 2019, arXiv:1905.13727).

Public names load on first use, so that listing hooks imports no torch.
"""

from typing import TYPE_CHECKING

from commhooks import lazy

if TYPE_CHECKING:
    from ch_powersgd.hooks import batched_powerSGD_hook, powerSGD_hook
    from ch_powersgd.powersgd import BatchedPowerSGD, PowerSGD
    from ch_powersgd.state import PowerSGDState

__all__ = ["BatchedPowerSGD", "PowerSGD", "PowerSGDState", "batched_powerSGD_hook", "powerSGD_hook"]

__getattr__, __dir__ = lazy(
    __name__,
    {
        "hooks": "batched_powerSGD_hook powerSGD_hook",
        "powersgd": "BatchedPowerSGD PowerSGD",
        "state": "PowerSGDState",
    },
)
