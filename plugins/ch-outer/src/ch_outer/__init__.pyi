"""The public names of this package, and the modules that define them.

Type checkers read this file. `lazy` reads it, too, and imports a name when it is first used.
"""

from ch_outer.fixed_ranks import FixedRanks as FixedRanks
from ch_outer.members import Members as Members
from ch_outer.optimizer import OuterOptimizer as OuterOptimizer
from ch_outer.outer_sgd import nesterov as nesterov
from ch_outer.outer_sgd import plain_sgd as plain_sgd
from ch_outer.presets import diloco as diloco
from ch_outer.presets import local_sgd as local_sgd
from ch_outer.presets import muloco as muloco
from ch_outer.presets import sparseloco as sparseloco
from ch_outer.presets import streaming_diloco as streaming_diloco
from ch_outer.schedule import Schedule as Schedule
