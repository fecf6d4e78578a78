"""Pytest plugin of the kit, with two fixtures. Loading it imports neither torch nor hypothesis."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from commhooks import Registry

for _module in ("case", "average", "description", "feedback", "fsdp1", "processes", "shards", "state"):
    pytest.register_assert_rewrite(f"ch_testing.contract_{_module}")


@contextmanager
def isolated() -> "Iterator[Registry]":
    """Empty the registry of everything but ch-wrappers and ch-ddp until the block ends."""
    from commhooks import GROUP, REGISTRY, Registry, discover, entries

    others = ",".join({entry.dist for entry in entries(GROUP)} - {"commhooks", "ch-wrappers", "ch-ddp"})

    kept = dict(REGISTRY.__dict__)
    REGISTRY.__dict__.update(Registry(lambda: discover({"COMMHOOKS_DISABLE": others})).__dict__)
    try:
        yield REGISTRY
    finally:
        REGISTRY.__dict__.update(kept)


@pytest.fixture
def isolated_registry() -> "Iterator[Registry]":
    """A registry that holds only ch-wrappers and ch-ddp; ``commhooks.register`` adds to it until the test ends."""
    with isolated() as registry:
        yield registry


@pytest.fixture
def spawn() -> Callable[..., list[Any]]:
    """Return :func:`ch_testing.spawn`, which runs a function on gloo processes."""
    from ch_testing.processes import spawn as run

    return run
