"""What ch-ft adds to commhooks: the adapters of its models, and what runs over a manager. Loads no torch."""

from collections.abc import Iterable, Mapping

from commhooks import hookimpl
from commhooks._metadata import version


@hookimpl
def commhooks_adapter() -> Iterable[tuple[str, str]]:
    """Both models, so that attaching to the one without buckets says why not."""
    return (
        ("ch_ft.ddp.DistributedDataParallel", "ch_ft.adapter:adapter"),
        ("ch_ft.pure.PureDistributedDataParallel", "ch_ft.adapter:refuse_pure"),
    )


@hookimpl
def commhooks_env() -> Mapping[str, str]:
    """Torchft is optional."""
    return {"torchft": version("torchft") or "not installed"}
