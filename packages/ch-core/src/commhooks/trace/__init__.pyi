"""The public names of this package, and the modules that define them.

Type checkers read this file. `lazy` reads it, too, and imports a name when it is first used.
"""

from commhooks.trace.chrome import merge as merge
from commhooks.trace.session import Trace as Trace
from commhooks.trace.summary import Summary as Summary
from commhooks.trace.summary import summarize as summarize
