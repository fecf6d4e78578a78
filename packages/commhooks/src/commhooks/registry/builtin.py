"""commhooks' own plugin: the refusal of FSDP1, and lines for `env`."""

from collections.abc import Iterable, Mapping

from commhooks.registry.distributions import version
from commhooks.registry.hookspecs import hookimpl


@hookimpl
def commhooks_adapter() -> Iterable[tuple[str, str]]:
    """Name the adapter of FSDP1, which refuses with advice, also if no package serves FSDP."""
    fsdp1 = "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel"
    return ((fsdp1, "commhooks.adapters.fsdp1:refuse"),)


@hookimpl
def commhooks_env() -> Mapping[str, str]:
    """Return the versions that a report needs first."""
    return {name: version(name) or "not installed" for name in ("torch", "pluggy", "rich", "numpy")}
