"""The pytest plugin of the kit: two fixtures. Loading it imports neither torch nor hypothesis."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from commhooks.registry.registry import Registry

for _module in ("contract_metadata", "contract_numerics", "contract_state", "contract_gloo", "gloo_worker"):
    pytest.register_assert_rewrite(f"commhooks.testing.{_module}")


@pytest.fixture
def isolated_registry() -> "Iterator[Registry]":
    """The registry with nothing in it but ch-core and ch-ddp; ``commhooks.register`` adds to it, until the test ends."""
    from commhooks.registry.discovery import GROUP, discover
    from commhooks.registry.metadata import entries
    from commhooks.registry.registry import REGISTRY, Registry

    others = ",".join({entry.dist for entry in entries(GROUP)} - {"ch-core", "ch-ddp"})

    kept = dict(REGISTRY.__dict__)
    REGISTRY.__dict__.update(Registry(lambda: discover({"COMMHOOKS_DISABLE": others})).__dict__)
    try:
        yield REGISTRY
    finally:
        REGISTRY.__dict__.update(kept)


@pytest.fixture
def spawn() -> Callable[..., list[Any]]:
    """:func:`commhooks.testing.spawn`: run a function on real gloo processes that end together."""
    from commhooks.testing.spawn import spawn as run

    return run
