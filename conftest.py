"""For every test of the repository."""

import sys
from collections.abc import Iterator

import pytest
from hypothesis import settings

# Machines that run tests are shared and noisy; the time limit of each test is pytest-timeout's.
# The same examples in every run: a failure is the change's, not the day's. `--hypothesis-profile=default` draws new ones.
settings.register_profile("commhooks", deadline=None, derandomize=True)
settings.load_profile("commhooks")

# What tests start as programs of their own does its work when it is imported, as a user's script does.
collect_ignore_glob = ["*/scripts/*", "*/observe.py", "*/matrix.py"]


@pytest.fixture(autouse=True)
def no_process_group_is_left() -> Iterator[None]:
    """A default group that a test leaves fails whoever makes the next one, in whatever file the same worker goes on with."""
    yield
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
        pytest.fail("this test left its default process group")
