"""The public names of this package, and the modules that define them.

Type checkers read this file. `lazy` reads it, too, and imports a name when it is first used.
"""

from ch_powersgd.hooks import batched_powerSGD_hook as batched_powerSGD_hook
from ch_powersgd.hooks import powerSGD_hook as powerSGD_hook
from ch_powersgd.powersgd import BatchedPowerSGD as BatchedPowerSGD
from ch_powersgd.powersgd import PowerSGD as PowerSGD
from ch_powersgd.state import PowerSGDState as PowerSGDState
