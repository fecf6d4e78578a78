"""What ch-ft adds to commhooks: the adapters of its models, and what runs over a manager. Loads no torch."""

from collections.abc import Iterable, Mapping

from ch_ft.torchft_support import installed_torchft
from commhooks import hookimpl


@hookimpl
def commhooks_adapter() -> Iterable[tuple[str, str]]:
    """Both models, so that attaching to the one without buckets says why not."""
    return (
        ("ch_ft.ddp.DistributedDataParallel", "ch_ft.ddp_binding:adapter"),
        ("ch_ft.ddp.PureDistributedDataParallel", "ch_ft.ddp_binding:refuse_pure"),
    )


@hookimpl
def commhooks_manager() -> Iterable[tuple[str, str]]:
    """Torchft's manager and the simulated one: between the groups of an FSDP2 model."""
    return (
        ("torchft.manager.Manager", "ch_ft.replica_groups:between"),
        ("ch_ft.simulator.SimulatedManager", "ch_ft.replica_groups:between"),
    )


@hookimpl
def commhooks_env() -> Mapping[str, str]:
    """Torchft is optional."""
    return {"torchft": installed_torchft() or "not installed"}
