"""Register ch-testing with commhooks: reductions over a simulated manager. Imports no torch."""

from collections.abc import Iterable

from commhooks import hookimpl


@hookimpl
def commhooks_adapter() -> Iterable[tuple[str, str]]:
    """Name the adapter of the simulated manager, which is the real manager's."""
    return (("ch_testing.simulated_manager.SimulatedManager", "ch_ft.replica_groups:between"),)
