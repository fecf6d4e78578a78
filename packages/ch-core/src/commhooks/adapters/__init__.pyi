"""The public names of this package, and the modules that define them.

Type checkers read this file. `lazy` reads it, too, and imports a name when it is first used.
"""

from commhooks.adapters.backward import NO_BACKWARD as NO_BACKWARD
from commhooks.adapters.backward import after_backward as after_backward
from commhooks.adapters.backward import at_end_of_backward as at_end_of_backward
from commhooks.adapters.backward import backward_id as backward_id
from commhooks.adapters.backward import if_interrupted as if_interrupted
from commhooks.adapters.backward import raise_after_backward as raise_after_backward
from commhooks.adapters.base import AttachOptions as AttachOptions
from commhooks.adapters.base import Binding as Binding
from commhooks.adapters.managed import Layouts as Layouts
from commhooks.adapters.managed import ManagedAxis as ManagedAxis
from commhooks.adapters.managed import ManagerAdapter as ManagerAdapter
from commhooks.adapters.managed import manager_adapter as manager_adapter
from commhooks.adapters.optimizer_watch import OptimizerWatch as OptimizerWatch
from commhooks.adapters.optimizer_watch import watch_optimizer as watch_optimizer
from commhooks.agreement import Fingerprint as Fingerprint
from commhooks.agreement import StoreExchange as StoreExchange
from commhooks.agreement import agree as agree
from commhooks.agreement import agree_along as agree_along
from commhooks.compositions.all_gather import Gathered as Gathered
from commhooks.compositions.reduce_scatter import Scattered as Scattered
from commhooks.device import SideStream as SideStream
from commhooks.device import record_use as record_use
from commhooks.digest import checksum as checksum
from commhooks.engine.bucket_run import BucketRun as BucketRun
from commhooks.engine.drift import RankCheck as RankCheck
from commhooks.engine.engine import Engine as Engine
from commhooks.engine.engine import StatelessEngine as StatelessEngine
from commhooks.engine.gather import GatherEngine as GatherEngine
from commhooks.engine.group import EngineGroup as EngineGroup
from commhooks.engine.outcome import StepJudge as StepJudge
from commhooks.engine.outcome import StepOutcome as StepOutcome
from commhooks.engine.schedule import TUNED as TUNED
from commhooks.engine.schedule import CpuTuning as CpuTuning
from commhooks.topology import Topology as Topology
from commhooks.transport.arrival import call_on_arrival as call_on_arrival
from commhooks.transport.base import Transport as Transport
from commhooks.transport.base import Work as Work
from commhooks.transport.loan import Loan as Loan
from commhooks.transport.loan import take_back as take_back
from commhooks.transport.process_group import ProcessGroupTransport as ProcessGroupTransport
from commhooks.transport.process_group import ProcessGroupWork as ProcessGroupWork
