"""The public names of this package, and the modules that define them.

Type checkers read this file. `lazy` reads it, too, and imports a name when it is first used.
"""

from ch_testing.conservation import mean_residuals as mean_residuals
from ch_testing.conservation import unaccounted as unaccounted
from ch_testing.contract import HookContract as HookContract
from ch_testing.faulty import Faulty as Faulty
from ch_testing.faulty import Injected as Injected
from ch_testing.log_lines import LogLines as LogLines
from ch_testing.processes import RankResult as RankResult
from ch_testing.processes import Ranks as Ranks
from ch_testing.processes import WorkerError as WorkerError
from ch_testing.processes import spawn as spawn
from ch_testing.simulated_manager import SimulatedCluster as SimulatedCluster
from ch_testing.simulated_manager import SimulatedDeath as SimulatedDeath
from ch_testing.simulated_manager import SimulatedManager as SimulatedManager
from ch_testing.simulated_ranks import SimulatedRanks as SimulatedRanks
