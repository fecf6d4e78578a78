"""Fault-tolerant data parallelism with gradient compression, over a torchft Manager.

`DistributedDataParallel(manager, module, hook="powersgd(rank=4)")` trains on while members die and come back: a step
that a dying member spoilt is not committed, by the optimizer or by the hook, and a returning member is healed.
torchft does membership, healing and voting; nothing here replaces it.
"""

from typing import TYPE_CHECKING

from commhooks import lazy

if TYPE_CHECKING:
    from ch_ft.ddp import DistributedDataParallel, PureDistributedDataParallel
    from ch_ft.local_manager import Local, local, start_lighthouse
    from ch_ft.manager import Manager, Membership, Reducer, Transaction
    from ch_ft.optimizer import OptimizerWrapper
    from ch_ft.simulator import SimulatedCluster, SimulatedDeath, SimulatedManager
    from ch_ft.transport import ManagerTransport

__all__ = [
    "DistributedDataParallel",
    "Local",
    "Manager",
    "ManagerTransport",
    "Membership",
    "OptimizerWrapper",
    "PureDistributedDataParallel",
    "Reducer",
    "SimulatedCluster",
    "SimulatedDeath",
    "SimulatedManager",
    "Transaction",
    "local",
    "start_lighthouse",
]

__getattr__, __dir__ = lazy(
    __name__,
    {
        "ddp": "DistributedDataParallel PureDistributedDataParallel",
        "local_manager": "Local local start_lighthouse",
        "optimizer": "OptimizerWrapper",
        "manager": "Manager Membership Reducer Transaction",
        "simulator": "SimulatedCluster SimulatedDeath SimulatedManager",
        "transport": "ManagerTransport",
    },
)
