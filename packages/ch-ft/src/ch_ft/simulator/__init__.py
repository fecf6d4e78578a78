"""Members of a quorum as threads of one process: the manager, and the process group inside it."""

from ch_ft.simulator.cluster import SimulatedCluster, SimulatedDeath, SimulatedManager

__all__ = ["SimulatedCluster", "SimulatedDeath", "SimulatedManager"]
