"""The public names of this package, and the modules that define them.

Type checkers read this file. `lazy` reads it, too, and imports a name when it is first used.
"""

from ch_wrappers.error_feedback import ErrorFeedback as ErrorFeedback
from ch_wrappers.policy import Policy as Policy
from ch_wrappers.two_level import TwoLevel as TwoLevel
from ch_wrappers.warmup import Warmup as Warmup
from ch_wrappers.wire_cast import WireCast as WireCast
