"""For every test of the repository."""

import os
import sys
from collections.abc import Iterator

import pytest
from hypothesis import settings

# Machines that run tests are shared and noisy; the time limit of each test is pytest-timeout's.
# The same examples in every run: a failure is the change's, not the day's. `--hypothesis-profile=default` draws new ones.
settings.register_profile("commhooks", deadline=None, derandomize=True)
settings.load_profile("commhooks")

# What tests start as programs of their own does its work when it is imported, as a user's script does.
collect_ignore_glob = ["*/scripts/*", "*/observe.py", "*/matrix.py", "*/frameworks/outer.py", "*/compatibility/*"]


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
