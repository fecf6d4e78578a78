"""The public names of this package, and the modules that define them.

Type checkers read this file. `lazy` reads it, too, and imports a name when it is first used.
"""

from commhooks.testing.conservation import mean_residuals as mean_residuals
from commhooks.testing.conservation import readings as readings
from commhooks.testing.conservation import unaccounted as unaccounted
from commhooks.testing.contract import HookContract as HookContract
from commhooks.testing.contract_fsdp1 import FlatHookContract as FlatHookContract
from commhooks.testing.faulty import Faulty as Faulty
from commhooks.testing.faulty import Injected as Injected
from commhooks.testing.simulated_ranks import SimulatedRanks as SimulatedRanks
from commhooks.testing.spawn import RankResult as RankResult
from commhooks.testing.spawn import Ranks as Ranks
from commhooks.testing.spawn import WorkerError as WorkerError
from commhooks.testing.spawn import spawn as spawn
