"""Register ch-ft with commhooks: adapters of its models, and reductions over a manager. Imports no torch."""

from collections.abc import Iterable, Mapping

from ch_ft.torchft_support import installed_torchft
from commhooks import hookimpl


@hookimpl
def commhooks_adapter() -> Iterable[tuple[str, str]]:
    """Name the adapters of both models. The adapter of the one without buckets refuses with a reason."""
    return (
        ("ch_ft.ddp.DistributedDataParallel", "ch_ft.ddp_binding:adapter"),
        ("ch_ft.ddp.PureDistributedDataParallel", "ch_ft.ddp_binding:refuse_pure"),
        ("torchft.manager.Manager", "ch_ft.replica_groups:between"),
    )


@hookimpl
def commhooks_local_gradients() -> Iterable[tuple[str, str]]:
    """Name the models over a manager. Under `commhooks run --outer` they are refused with a reason."""
    return (
        ("ch_ft.ddp.DistributedDataParallel", "ch_ft.local_gradients:refuse"),
        ("torchft.ddp.DistributedDataParallel", "ch_ft.local_gradients:refuse"),
    )


@hookimpl
def commhooks_env() -> Mapping[str, str]:
    """Report the version of torchft, which is optional."""
    return {"torchft": installed_torchft() or "not installed"}
