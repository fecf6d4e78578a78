"""For every test of the repository."""

import os
import sys
from collections.abc import Iterator
from zlib import crc32

import pytest
from hypothesis import settings

from tests.seed import SEED

# Machines that run tests are shared and noisy; the time limit of each test is pytest-timeout's.
# The same examples in every run: a failure is the change's, not the day's. `--hypothesis-profile=default` draws new ones.
settings.register_profile("commhooks", deadline=None, derandomize=True)
settings.load_profile("commhooks")

# What tests start as programs of their own does its work when it is imported, as a user's script does.
collect_ignore_glob = ["*/scripts/*", "*/observe.py", "*/matrix.py", "*/frameworks/outer.py", "*/compatibility/*"]


DRAW = int(os.environ.get("COMMHOOKS_DRAW", "1"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out all but one of `COMMHOOKS_DRAW` tests of the full set. The seed and the name of a test decide."""

    def drawn(item: pytest.Item) -> bool:
        full = item.get_closest_marker("full") or item.get_closest_marker("campaign")
        return full is None or crc32(f"{SEED} {item.nodeid}".encode()) % DRAW == 0

    if DRAW > 1:
        config.hook.pytest_deselected(items=[item for item in items if not drawn(item)])
        items[:] = filter(drawn, items)


RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # what a launcher sets


@pytest.fixture(autouse=True)
def no_rank_is_left() -> Iterator[None]:
    """A test that leaves a default group, or an environment that makes one, fails others on the same worker: it is named."""
    before = {name: os.environ.get(name) for name in RANK}
    yield
    left = [name for name in RANK if os.environ.get(name) != before[name]]
    for name in left:
        if (value := before[name]) is None:
            del os.environ[name]
        else:
            os.environ[name] = value
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
        left.append("its default process group")
    if left:
        pytest.fail(f"this test left {', '.join(left)}")


@pytest.fixture(autouse=True)
def no_forward_is_left_running() -> Iterator[None]:
    """Ranks are threads in some tests, and torch has one variable for the model in its forward. Two threads restore it in the
    wrong order, and later tests would compile for that model, or take its forward for theirs.
    """
    yield
    module = sys.modules.get("torch.nn.parallel.distributed")
    if module is not None:
        module.DistributedDataParallel._active_ddp_module = None
