"""The public names of this package, and the modules that define them.

Type checkers read this file. `lazy` reads it, too, and imports a name when it is first used.
"""

from ch_ft.ddp import DistributedDataParallel as DistributedDataParallel
from ch_ft.ddp import PureDistributedDataParallel as PureDistributedDataParallel
from ch_ft.local_manager import Local as Local
from ch_ft.local_manager import local as local
from ch_ft.local_manager import start_lighthouse as start_lighthouse
from ch_ft.manager import Manager as Manager
from ch_ft.manager import Membership as Membership
from ch_ft.manager import Reducer as Reducer
from ch_ft.manager import Transaction as Transaction
from ch_ft.manager import Work as Work
from ch_ft.optimizer import OptimizerWrapper as OptimizerWrapper
from ch_ft.transport import ManagerTransport as ManagerTransport
