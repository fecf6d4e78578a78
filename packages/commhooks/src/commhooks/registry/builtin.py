"""commhooks' own plugin: lines for `env`."""

from collections.abc import Mapping

from commhooks.registry.distributions import version
from commhooks.registry.hookspecs import hookimpl


@hookimpl
def commhooks_env() -> Mapping[str, str]:
    """Return the versions that a report needs first."""
    return {name: version(name) or "not installed" for name in ("torch", "pluggy", "rich", "numpy")}
