"""Test kit: real gloo processes, simulated ranks, and the contract that every hook must pass.

Needs pytest (``pip install ch-core[testing]``). Names are imported when first used.
"""

from typing import TYPE_CHECKING

from commhooks._lazy import lazy
from commhooks.testing.spawn import RankResult, Ranks, WorkerError, spawn

if TYPE_CHECKING:
    from commhooks.testing.conservation import mean_residuals, readings, unaccounted
    from commhooks.testing.contract import HookContract
    from commhooks.testing.contract_fsdp1 import FlatHookContract
    from commhooks.testing.faulty import Faulty, Injected
    from commhooks.testing.simulated_ranks import SimulatedRanks

__all__ = [
    "Faulty",
    "FlatHookContract",
    "HookContract",
    "Injected",
    "RankResult",
    "Ranks",
    "SimulatedRanks",
    "WorkerError",
    "mean_residuals",
    "readings",
    "spawn",
    "unaccounted",
]

__getattr__, __dir__ = lazy(
    __name__,
    {
        "conservation": "mean_residuals readings unaccounted",
        "contract": "HookContract",
        "faulty": "Faulty Injected",
        "contract_fsdp1": "FlatHookContract",
        "simulated_ranks": "SimulatedRanks",
    },
)
